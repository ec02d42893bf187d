"""What the environment of a cluster says of this machine's place in a run.

Never talks to another machine, but for asking SLURM or PMIx.
"""
