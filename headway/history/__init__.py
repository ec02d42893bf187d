"""What is kept of every run: its record, written beside the ranks and read by `headway why`.

Never knows a plan or a rank's process.
"""
