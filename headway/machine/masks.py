"""Which GPUs a variable such as CUDA_VISIBLE_DEVICES shows, as their makers' runtimes read it.

Each function returns those GPUs in torch's order, with their names in the variable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.machine.facts import Gpu


def entries(mask: str) -> list[int | str]:
    """Return the indices, or the prefixes of UUIDs, that torch reads in CUDA_VISIBLE_DEVICES.

    An entry that is none ends the list, and a repeated one empties it.
    Source: `_parse_visible_devices` in torch/cuda/__init__.py.
    """
    found: list[int | str] = []
    prefix = mask[:4] if mask.startswith(("GPU-", "MIG-")) else ""
    for text in mask.split(","):
        number = re.match(r"[+-]?\d{1,4000}", text.strip())  # int() fails for more digits
        entry = text if prefix else int(number[0]) if number else -1
        if entry in found:
            return []
        if not text.startswith(prefix) or (isinstance(entry, int) and entry < 0):
            break
        found.append(entry)
    return found


def shown_by_cuda(mask: str, gpus: Sequence[Gpu]) -> list[tuple[str, Gpu]]:
    """Read CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES; an index is the first slice of a GPU."""
    shown: dict[tuple[int, int], str] = {}
    for entry in entries(mask):
        if isinstance(entry, int):
            places = [(entry, 0)] if entry < len(gpus) else []
        else:
            places = [
                (index, max(0, part - 1))
                for index, gpu in enumerate(gpus)
                for part, uuid in enumerate((gpu.uuid, *(one.uuid for one in gpu.slices)))
                if uuid.startswith(entry)
            ]
        if len(places) != 1:
            break
        if places[0] in shown:
            return []
        shown[places[0]] = str(entry)
    return [(name, gpus[i].parts()[j]) for (i, j), name in shown.items()]


def shown_by_level_zero(mask: str, gpus: Sequence[Gpu]) -> list[tuple[str, Gpu]]:
    """Read ZE_AFFINITY_MASK, a set of cards (1) and tiles (1.0), or of tiles alone (3).

    Other entries are ignored. Source: compute-runtime, execution_environment.cpp.
    """
    if mask in ("", "default"):
        return [(str(index), gpu) for index, gpu in enumerate(gpus)]
    shown: dict[int, list[str]] = {}
    for entry in mask.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})(?:\.(\d{1,9}))?\s*", entry)
        if found is None or int(found[1]) >= len(gpus):
            continue
        if found[2] is None or int(found[2]) < gpus[int(found[1])].tiles:
            shown.setdefault(int(found[1]), []).append(found[0].strip())
    return [(",".join(names), gpus[index]) for index, names in sorted(shown.items())]
