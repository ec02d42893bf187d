"""Compares tensors before ranks exchange them: different shapes are an error that says so."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from headway.containers import leaves
from headway.errors import UsageError
from headway.meeting import meet
from headway.world import rank_and_size

_REMEDIES = {
    "gather": "pad them first with accelerator.pad_across_processes(...), or pass lists to "
    "gather_for_metrics(..., use_gather_object=True)",
    "reduce": "let every rank reduce tensors of the same shapes, as many and in the same order",
    "pad_across_processes": "pass tensors that differ in that one dimension only",
    "broadcast": "pass tensors of the sender's shapes, or use broadcast_object_list(...)",
}


class DifferentTensors(UsageError, RuntimeError):
    """Ranks gave one operation tensors of different shapes or types, or not equally many."""


def require_same_tensors(data: Any, operation: str, *, but_dimension: int | None = None) -> None:
    """Raise on all ranks if their tensors do not fit together.

    Without this, gloo aborts one rank and gives another memory that nobody wrote. NCCL's ranks run
    ahead of their GPUs and would be held up, so tensors on GPUs are compared only where torch's own
    checks are on (TORCH_DISTRIBUTED_DEBUG=INFO).

    Args:
        data: nested tensors, in the same nesting on all ranks.
        operation: `gather`, `reduce`, `broadcast` or `pad_across_processes`.
        but_dimension: the one along which sizes may differ.

    Raises:
        DifferentTensors: with the tensors of two ranks that differ.
    """
    _, size = rank_and_size()
    if size == 1:
        return
    tensors = [one for one in leaves(data) if isinstance(one, torch.Tensor)]
    if any(one.is_cuda for one in tensors) and dist.get_debug_level() == dist.DebugLevel.OFF:
        return
    own = ", ".join(_described(one, but_dimension) for one in tensors) or "no tensor"
    everyones = meet(f"{operation}(...)", own)
    if everyones is None:
        return
    other = next(rank for rank in range(size) if everyones[rank] != everyones[0])
    raise DifferentTensors(
        f"{operation}() got different tensors: {everyones[0]} on rank 0, "
        f"{everyones[other]} on rank {other}",
        where=f"the script's {operation}(...)",
        fix=_REMEDIES[operation],
    )


def _described(tensor: torch.Tensor, but_dimension: int | None) -> str:
    sizes = [*map(str, tensor.shape)]
    if but_dimension is not None and -len(sizes) <= but_dimension < len(sizes):
        sizes[but_dimension] = "any"
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
