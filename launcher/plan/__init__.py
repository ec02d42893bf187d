"""What one launch will be, as a frozen value, from settings and a machine.

Starts nothing, reads no files but the script's, and knows nothing of torch.
"""
