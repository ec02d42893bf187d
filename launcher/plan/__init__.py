"""Builds the frozen plan of a launch, without starting processes, reading files or using torch."""
