"""All kinds of devices, the best first, and those that other packages add."""

from __future__ import annotations

import os
import sys
from functools import cache

from headway.devices.cpu import Cpu
from headway.devices.cuda import Cuda
from headway.devices.kind import DeviceKind
from headway.devices.mps import Mps
from headway.devices.xpu import Xpu

CPU, CUDA, MPS = Cpu(), Cuda(), Mps()
KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (CUDA, Xpu(), MPS, CPU)}
GROUP = "headway.devices"
"""The entry points by which other packages add kinds, by their names."""


def kind_of(name: str) -> DeviceKind:
    """Return the kind with torch's name `name`; the CPU's for one that is not in the table."""
    return KINDS.get(name, CPU)


def is_kind(name: str) -> bool:
    """Return whether there is such a kind; other packages are asked for one that is unknown."""
    return name in KINDS or name in outside_kinds()


@cache
def outside_kinds() -> dict[str, DeviceKind]:
    """Return the kinds that other packages add, which are in `KINDS` from now on.

    It is called only if a name is unknown or `device: auto` finds nothing.
    """
    if not _is_announced():  # importlib.metadata takes longer to import than argparse
        return {}
    from importlib.metadata import entry_points

    found = {one.name: one.load()() for one in entry_points(group=GROUP) if one.name not in KINDS}
    KINDS.update(found)
    return found


def _is_announced() -> bool:
    """Return whether an installed package has entry points of the group."""
    for folder in sys.path:
        try:
            names = [name for name in os.listdir(folder or ".") if name.endswith("-info")]
        except OSError:
            continue
        for name in names:
            try:
                with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                    if GROUP.encode() in file.read():
                        return True
            except OSError:  # most packages have none
                continue
    return False
