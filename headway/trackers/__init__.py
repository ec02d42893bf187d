"""Where a script's metrics go: the built-in file, and adapters of other packages."""
