"""Records of runs, read by `headway runs`, `why` and `logs`.

The package is independent of plans and rank processes.
"""
