"""Names of `accelerate.test_utils.testing`."""

from headway.compat.forwarding import forward
from headway.compat.test_utils import torch_device as torch_device

__getattr__, __dir__ = forward(__name__)
