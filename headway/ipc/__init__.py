"""Protocol between launcher and runtime: `run_contract` to the rank, `records` to the launcher.
Both import it; it imports only errors and devices.
"""
