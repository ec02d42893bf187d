"""Multi-node runs: machine 0 decides when all ranks start, restart and stop.

This package does not handle the ranks' processes or their output.
"""
