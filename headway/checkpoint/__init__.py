"""Checkpoints, each complete or not there: written, verified, listed and removed."""
