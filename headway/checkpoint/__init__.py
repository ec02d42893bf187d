"""Checkpoints: atomic saving, verification, listing, pruning and resume."""
