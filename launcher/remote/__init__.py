"""Launches on other machines: as a SLURM job, or on hosts over ssh.

The machines run `headway launch`, which manages their ranks.
"""
