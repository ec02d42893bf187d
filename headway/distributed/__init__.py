"""Ranks, the process group, and communication between ranks."""
