"""This machine's place in a run, from a cluster's environment variables.

Never contacts another machine, except a SLURM or PMIx server.
"""
