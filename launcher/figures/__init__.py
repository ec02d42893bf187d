"""Step metrics of a run: collected from all ranks, analyzed and reported."""
