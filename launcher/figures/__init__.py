"""What the steps of a run take: collected from all ranks, judged, and told in words."""
