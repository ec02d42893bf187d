"""Runs of several launchers: machine 0 decides when all ranks start, restart and end.

Nothing here handles the ranks' processes or their output.
"""
