"""The process that runs a script with fake tensors and counts their bytes."""
