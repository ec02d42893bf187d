"""Names of `accelerate.utils.other`."""

from headway.compat.forwarding import forward

__getattr__, __dir__ = forward(__name__)
