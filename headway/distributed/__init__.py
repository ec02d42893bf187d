"""The ranks of a run, and communication between them."""
