"""Several launchers, one run: machine 0 decides when all start, restart and end.

Knows no process of a rank, and nothing of what ranks print.
"""
