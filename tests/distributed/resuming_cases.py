"""The configurations in which resuming_worker.py trains."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A configuration.

    Args:
        at: the step after which it is saved.
        size: samples in the data set.
    """

    at: int
    size: int = 41
    workers: int = 0
    dropout: float = 0.3
    options: Mapping[str, Any] = MappingProxyType({})


GLOBAL = {"seed": 7, "global_batch_size": 12}
SAME_RANKS = {
    "plain": Case(4),
    "between two optimizer steps": Case(8, options={"gradient_accumulation_steps": 3}),
    "workers": Case(3, workers=2),
    "workers and seed": Case(4, workers=2, options={"seed": 7}),
    "seed": Case(2, options={"seed": 7, "gradient_accumulation_steps": 2}),
    "dispatch": Case(4, options={"dataloader_config": {"dispatch_batches": True}}),
    "dispatch and seed": Case(
        3, workers=1, options={"seed": 7, "dataloader_config": {"dispatch_batches": True}}
    ),
    "split": Case(9, options={"dataloader_config": {"split_batches": True}}),
    "nothing repeated": Case(2, size=45, options={"dataloader_config": {"even_batches": False}}),
}
ANY_RANKS = {
    f"{name}, {workers} workers": Case(2, size, workers, 0, options={**GLOBAL, **options})
    for workers in (0, 2)
    for name, size, options in (
        ("even", 48, {"gradient_accumulation_steps": 1}),
        ("uneven", 41, {"dataloader_config": {"dispatch_batches": workers == 2 or None}}),
    )
}
