"""The state of a training, preparation of its objects, and training steps."""
