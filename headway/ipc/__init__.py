"""The protocol between launcher and runtime: a rank receives a `run_contract` and sends `records`.
Both import this package, which itself imports only the packages `errors` and `devices`.
"""
