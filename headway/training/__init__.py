"""The state of a training run, the preparation of its objects, and training steps."""
