"""Decides, then starts: settings and a machine become a plan, a plan becomes running ranks."""
