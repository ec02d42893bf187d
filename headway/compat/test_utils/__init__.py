"""Names of `accelerate.test_utils`: the device that tests run on."""

import torch

from headway.compat.forwarding import forward

__getattr__, __dir__ = forward(__name__)


def _best_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


torch_device = _best_device()
"""The type of the device that tests run on: `cuda`, `mps` or `cpu`."""
