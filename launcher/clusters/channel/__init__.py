"""The channel between the launchers of one run: authenticated messages to and from machine 0."""
