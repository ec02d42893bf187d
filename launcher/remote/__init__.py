"""Starts launches elsewhere: as a job of SLURM, or on other hosts over ssh."""
