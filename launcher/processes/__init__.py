"""Starts and stops the ranks of this machine, and terminates all processes that they started.

`output` reads the ranks' output, and `diagnosis` explains their failures.
"""
