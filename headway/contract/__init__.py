"""What launcher and runtime tell each other: `run` down, `records` up. Both may come in; nothing of
ours but errors is imported here.
"""
