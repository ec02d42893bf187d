"""Draws the metrics of runs: in a terminal, or as a picture."""
