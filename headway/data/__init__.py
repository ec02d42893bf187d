"""Prepared data loaders: sharding across ranks and exact resume. Only the runtime imports it."""
