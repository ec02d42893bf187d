"""The protocol between launcher and runtime: a rank receives a `run_contract` and sends `records`.
The launcher and the runtime import this package, which imports only `errors` and `devices`.
"""
