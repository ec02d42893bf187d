"""Prints the devices that torch detects: `python -m headway.devices.list_devices cuda [try]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from headway.devices.kind import DeviceKind
from headway.devices.table import CUDA, kind_of


def main(words: Sequence[str]) -> None:
    """Print a line of JSON for `machine/torch_query.py`; with `try`, also use the first device."""
    import torch

    kind, found, error, architectures = kind_of(words[0]), [], "", []
    try:
        kind.load()
        count = kind.count() if kind.is_available() else 0
        found = [_facts(getattr(torch, kind.name), index, kind) for index in range(count)]
        if not found or "try" in words:
            torch.zeros(1, device=kind.name)
        if kind.name == CUDA.name:
            architectures = torch.cuda.get_arch_list()
    except Exception as reason:  # noqa: BLE001  a driver may raise anything
        error = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
    answer = {"version": torch.__version__, "gpus": found, "error": error}
    print(json.dumps({**answer, "architectures": architectures}))


def _facts(part: Any, index: int, kind: DeviceKind) -> dict[str, Any]:
    """Return a device's properties, as reported by torch, as fields of `Gpu`."""
    if not kind.is_numbered:
        return {"name": kind.label}
    found = part.get_device_properties(index)
    uuid = getattr(found, "uuid", "")
    return {
        "name": found.name,
        "uuid": f"GPU-{uuid}" if uuid else "",
        "memory_bytes": found.total_memory,
        "capability": (found.major, found.minor) if hasattr(found, "major") else None,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
