"""Names of `accelerate.hooks`."""

from headway.compat.forwarding import forward

__getattr__, __dir__ = forward(__name__)
