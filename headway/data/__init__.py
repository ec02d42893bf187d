"""The loaders of a prepared script: which rank reads which samples. Only the runtime comes in."""
