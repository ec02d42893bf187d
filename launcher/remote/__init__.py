"""Runs launches on other machines, either as SLURM jobs or over ssh.

Each of these machines runs `headway launch`, which manages its ranks.
"""
