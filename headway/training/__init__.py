"""The parts of a training: what it consists of, how objects are prepared, and how it steps."""
