"""Copies batches to a CUDA device while the batch before them is computed on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from headway.containers import send_to_device
from headway.data.active_loader import GlobalBatch
from headway.data.sharding import Unpack


def copied_ahead(
    items: Iterator[Any], unpack: Unpack, device: torch.device
) -> tuple[Iterator[Any], Unpack]:  # pragma: needs a GPU
    """Return `items` and `unpack` with batches that are copied on a stream of their own.

    A copy starts when its item is taken, and the current stream waits for it when the item is
    unpacked. It overlaps where the batch is in pinned memory; its memory may then be used anew for
    a later copy, as that one waits for all work which was queued before it.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copies() -> Iterator[tuple[Any, GlobalBatch]]:
        for item in items:
            batch, global_batch = unpack(item)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                batch = send_to_device(batch, device, non_blocking=True)
            yield batch, global_batch

    def wait_for(item: tuple[Any, GlobalBatch]) -> tuple[Any, GlobalBatch]:
        torch.cuda.current_stream(device).wait_stream(stream)
        return item

    return copies(), wait_for
