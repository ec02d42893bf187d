"""The frozen plan of a launch. Starts nothing, reads no files, imports no torch."""
