"""What is kept of every run: its record, read by `headway runs`, `why` and `logs`.

Never knows a plan or a rank's process.
"""
