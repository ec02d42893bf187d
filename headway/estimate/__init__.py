"""How much memory a training script takes: it is run without memory, its tensors counted."""
