"""One seed for every random number generator of this process."""

from __future__ import annotations

import random
from importlib import import_module
from importlib.util import find_spec

import torch

from headway.contract.run import read_ranks
from headway.world import rank_and_size


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's (where installed) and torch's generators, on all devices.

    Every rank gets the same seed, so that models start with equal weights. The ranks then also draw
    the same random augmentations for their different samples, and the same dropout masks.

    Args:
        seed: from 0 to 2**32 - 1.
        device_specific: add the rank to the seed, so that each rank draws its own numbers.
        deterministic: let torch use deterministic algorithms only, or raise an error.

    Examples:
        >>> import torch
        >>> from headway.utils import set_seed
        >>> set_seed(0)
        >>> first = torch.rand(2)
        >>> set_seed(0)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    if device_specific:
        ranks = read_ranks()
        seed += rank_and_size()[0] if ranks is None else ranks.rank
    random.seed(seed)
    if find_spec("numpy") is not None:
        import_module("numpy").random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
