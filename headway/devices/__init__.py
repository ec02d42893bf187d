"""The kinds of devices: `kind` has the base, `table` lists them."""
