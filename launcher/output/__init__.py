"""Shows and keeps what the ranks print.

Never judges it.
"""
