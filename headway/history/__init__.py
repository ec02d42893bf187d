"""Records of runs, read by `headway runs`, `why` and `logs`.

Independent of plans and rank processes.
"""
