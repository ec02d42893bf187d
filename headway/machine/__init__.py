"""Hardware detection without importing torch. Any package may import this package."""
