"""Memory estimation: run a training script with fake tensors and count their bytes."""
