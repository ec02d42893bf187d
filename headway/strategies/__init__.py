"""Strategies for sharing a model between ranks; part of the runtime only."""
