"""Names of `accelerate.utils.transformer_engine`."""

from headway.compat.forwarding import forward

__getattr__, __dir__ = forward(__name__)
