"""Protocol between launcher and runtime: `run_contract` to a rank, `records` to the launcher.
Both import this package, which itself imports only the packages `errors` and `devices`.
"""
