"""Device kinds: `kind` defines the base classes, and `table` lists all kinds."""
