"""Settings: their table, the layers and profiles that set them, and their checks."""
