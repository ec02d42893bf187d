"""Code that runs in each rank's process, around the script.

This code makes no decisions for other ranks, and imports torch only after the script does.
"""
