"""The process that runs a script without memory, and counts its tensors."""
