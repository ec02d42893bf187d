"""Names of `accelerate.local_sgd`."""

from headway.compat.forwarding import forward

__getattr__, __dir__ = forward(__name__)
