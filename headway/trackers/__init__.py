"""Experiment trackers: the built-in `jsonl` tracker, and adapters for other packages."""
