"""What Headway relies on of DistributedDataParallel that torch does not document."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.errors import UsageError
from headway.strategies.ddp import _fix_buckets, _watch_frozen

pytestmark = pytest.mark.usefixtures("group")


def has_fixed_buckets(model: DistributedDataParallel) -> bool:
    """Return whether the first step had the buckets of all others; DDP says so in the second."""
    logged: Any = model._get_ddp_logging_data
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    return bool(logged()["has_rebuilt_buckets"])


def test_buckets_are_fixed_before_the_first_step_and_gradients_are_as_they_were() -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert not has_fixed_buckets(DistributedDataParallel(layers))
    layers.zero_grad()
    model = DistributedDataParallel(layers)
    before = layers[0].weight.grad = torch.ones(4, 3)
    _fix_buckets(model)
    assert layers[0].weight.grad is before
    assert torch.equal(before, torch.ones(4, 3))
    assert layers[1].weight.grad is None
    assert has_fixed_buckets(model)


def test_hooks_on_gradients_see_none_of_zeros() -> None:
    layer = nn.Linear(3, 4)
    seen: list[torch.Tensor] = []
    weight: Any = layer.weight
    weight.register_post_accumulate_grad_hook(seen.append)
    _fix_buckets(DistributedDataParallel(layer))
    assert not seen


def test_a_parameter_that_is_unfrozen_later_is_refused_where_it_would_be_trained() -> None:
    layers = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))
    model = DistributedDataParallel(layers)
    _watch_frozen(model)
    model(torch.ones(1, 3)).sum().backward()
    layers[0].requires_grad_(True)
    with torch.no_grad():
        model(torch.ones(1, 3))
    with pytest.raises(UsageError) as refused:
        model(torch.ones(1, 3))
    assert "0.weight" in refused.value.problems[0].what
