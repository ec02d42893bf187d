"""Mixed precision of forward and backward passes. Only the runtime imports this package."""
