"""Hooks that make training libraries stop, save and resume under the launcher."""
