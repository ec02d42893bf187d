"""Collects, analyzes and reports the step metrics of all ranks."""
