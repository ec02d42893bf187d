"""Joins training libraries that a script imports: they stop, save and resume under the launcher."""
