"""The protocol between launcher and runtime: `run_contract` to the rank, `records` to the launcher.
Imported by both; imports only errors and devices.
"""
