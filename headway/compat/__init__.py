"""Accelerate's modules under the names that its users import, with Accelerate's behaviour."""
