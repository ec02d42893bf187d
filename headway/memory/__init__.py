"""The memory of devices: what it has, and what happens where it runs out."""
