"""Finds the causes of failures and hangs.

Never starts, stops or signals ranks, except to request their stacks.
"""
