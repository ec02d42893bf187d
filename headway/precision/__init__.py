"""The number formats of a forward and backward pass. Only the runtime comes in."""
