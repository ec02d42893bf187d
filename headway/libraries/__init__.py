"""Joins training libraries that a script imports: they stop, save and go on under the launcher."""
