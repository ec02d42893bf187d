"""Settings: the table, layers and profiles that set values, and checks."""
