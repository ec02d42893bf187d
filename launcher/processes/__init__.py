"""Starts and stops the ranks of this machine, and terminates all processes that they started.

`output` reads what the ranks print, and `diagnosis` explains their failures.
"""
