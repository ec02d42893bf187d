"""The launcher: makes a plan from the settings and the machine, and runs its ranks."""
