"""Starts and supervises the ranks: agent, fork server, GPU claims. Imported only by `run` and the
commands.
"""
