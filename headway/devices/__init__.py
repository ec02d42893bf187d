"""Device kinds: the base class in `kind`, all kinds in `table`."""
