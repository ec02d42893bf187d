"""Saves checkpoints atomically, verifies, lists and prunes them, and resumes from them."""
