"""Names of `accelerate.utils.megatron_lm`."""

from headway.compat.forwarding import forward

__getattr__, __dir__ = forward(__name__)
