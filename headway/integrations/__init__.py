"""Hooks for training libraries, so that they stop, save and resume under the launcher."""
