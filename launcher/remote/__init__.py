"""Launches on other machines: as a SLURM job, or on hosts over ssh.

These machines run `headway launch`; nothing here manages ranks.
"""
