"""Checkpoints: saving them atomically, verifying, listing and pruning them, and resuming."""
