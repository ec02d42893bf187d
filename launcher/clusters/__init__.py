"""Detects clusters, and reads settings and ranks from a scheduler's environment variables.

This package does not contact other machines, except a SLURM or PMIx server.
"""
