"""How the machines of one run find each other. Only `starting` and `run` come in."""
