"""Hardware detection without torch; each fact has its source. Any package may import it."""
