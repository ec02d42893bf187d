"""Runs in a rank's process, around the script.

Makes no decisions for other ranks, and imports torch only after the script.
"""
