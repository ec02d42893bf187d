"""What runs in a rank's own process, around the script. Only `starting` and `run` come in."""
