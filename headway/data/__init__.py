"""Prepared data loaders: sharding and exact resume. Only the runtime imports this package."""
