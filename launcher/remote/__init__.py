"""Starts launches elsewhere: as a job of SLURM, or on other hosts over ssh.

Knows nothing of ranks: what starts there is `headway launch`.
"""
