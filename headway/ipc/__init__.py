"""Protocol between launcher and runtime: `run_contract` to the rank, `records` to the launcher.
Launcher and runtime import this package, which imports only errors and devices.
"""
