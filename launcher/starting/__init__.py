"""Starts the ranks and stays until they have ended: agent, fork server, GPU claims. Only `run` and
the commands come in.
"""
