"""Migrates scripts from Accelerate: maps names, lists differences and rewrites imports."""
