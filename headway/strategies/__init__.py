"""Strategies for distributing a model over ranks. Only the runtime imports this package."""
