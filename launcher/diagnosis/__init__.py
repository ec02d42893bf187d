"""Finds the causes of failures and hangs.

This package never starts, stops or signals ranks, except to request their stacks.
"""
