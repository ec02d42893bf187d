"""Detects what a machine has, each fact with its reason, without torch. Any room may import it."""
