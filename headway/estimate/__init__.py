"""How much memory a training script will take: it is run without memory, and its tensors counted."""
