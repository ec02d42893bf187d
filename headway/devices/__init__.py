"""The kinds of devices, one file each; `table` lists them."""
