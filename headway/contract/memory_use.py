"""The memory of GPUs that ranks have taken: read in a rank, told of in one line after the run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from headway.contract.records import MemoryUse
from headway.devices.table import KINDS


def read_memory_use() -> MemoryUse | None:
    """Return the most that torch has held of one GPU in this process; None if of none.

    The counters are torch's own, which count from the start, or from the script's last
    `torch.cuda.reset_peak_memory_stats()`. Neither torch is imported nor a GPU initialised.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    counted = [MemoryUse(*peak) for kind in KINDS.values() for peak in kind.peaks(torch)]
    return max((one for one in counted if one.reserved), default=None)


def describe_memory_use(estimated_bytes: int, by_rank: Mapping[int, MemoryUse]) -> str:
    """Return the line that compares an estimate for each rank with what the highest has taken."""
    highest = max(by_rank, key=lambda rank: by_rank[rank])
    use = by_rank[highest]
    of = f" (highest of {len(by_rank)} ranks: rank {highest})" if len(by_rank) > 1 else ""
    return (
        f"memory: estimated {size(estimated_bytes)}, allocated {size(use.allocated)}, "
        f"reserved {size(use.reserved)}{of}"
    )


def size(nbytes: int) -> str:
    """Return bytes for people: 31.42 GiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{nbytes} B"
        value /= 1024
    return f"{value:.2f} GiB"
