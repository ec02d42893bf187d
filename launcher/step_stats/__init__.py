"""Collects, analyzes and reports the step statistics of all ranks."""
