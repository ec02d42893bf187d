"""The ranks of a run: this one among the others, and what they exchange."""
