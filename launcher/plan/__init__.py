"""The frozen plan of a launch. Starts no processes, reads no files and does not import torch."""
