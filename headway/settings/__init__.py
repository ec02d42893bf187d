"""The table of settings, the layers that set them, profiles, and checks of their values."""
