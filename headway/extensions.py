"""Entry points by which other packages add device kinds and clusters."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DEVICES, CLUSTERS = "headway.devices", "headway.clusters"
"""The groups: `name = module:DeviceKind` and `name = module:CLUSTER`."""


@cache
def extensions(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by their names, without loading one.

    The launch path calls it only if a name is unknown, or `device: auto` finds nothing.
    """
    if not _is_announced(group):  # importlib.metadata takes longer to import than argparse
        return {}
    from importlib.metadata import entry_points

    return {found.name: found for found in entry_points(group=group)}


def _is_announced(group: str) -> bool:
    """Return whether an installed package has entry points of the group."""
    for folder in sys.path:
        try:
            names = [name for name in os.listdir(folder or ".") if name.endswith("-info")]
        except OSError:
            continue
        for name in names:
            try:
                with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                    if group.encode() in file.read():
                        return True
            except OSError:  # most packages have none
                continue
    return False
