"""Builds the frozen plan of a launch from settings and machine, without I/O. Imported by the
commands and the later rooms of the launcher.
"""
