"""Displays and stores the ranks' output, without interpreting it."""
