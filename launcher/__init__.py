"""The launcher: plans a launch from the settings and the machine, and runs the ranks."""
