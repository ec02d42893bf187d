"""Runs in a rank's process, around the script. Imported only by `starting` and `run`."""
