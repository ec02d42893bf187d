"""Code that runs in a rank's process, around the script.

It makes no decisions for other ranks, and imports torch only after the script does.
"""
