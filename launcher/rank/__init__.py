"""Runs in a rank's process, around the script.

Never decides for other ranks, and imports torch only after the script did.
"""
