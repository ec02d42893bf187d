"""Settings of other launchers in ours, and back. Only the dispatcher comes in."""
