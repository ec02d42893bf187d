"""Copies to a GPU that overlap with the batch before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from headway.data.configuration import DataLoaderConfiguration
from headway.data.loader import PreparedDataLoader


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [True, False])
def test_batches_copied_ahead_are_complete_when_they_are_used(pinned: bool) -> None:
    device = torch.device("cuda", 0)
    rows: Any = torch.arange(64.0).repeat_interleave(1 << 20).reshape(64, 1 << 20)
    loader = DataLoader(rows, batch_size=8, pin_memory=pinned)
    config = DataLoaderConfiguration(non_blocking=True)
    weight = torch.ones(1 << 20, device=device)
    sums = [batch @ weight for batch in PreparedDataLoader(loader, config=config, device=device)]
    assert torch.equal(torch.cat(sums).cpu(), torch.arange(64.0) * (1 << 20))
