"""All kinds of devices, the best first, and those that other packages add."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from headway.devices.cuda import Cuda
from headway.devices.kind import DeviceKind
from headway.devices.mps import Mps
from headway.devices.xpu import Xpu
from headway.extensions import DEVICES, extensions

CPU, CUDA, MPS = DeviceKind(), Cuda(), Mps()
KINDS: Mapping[str, DeviceKind] = {kind.name: kind for kind in (CUDA, Xpu(), MPS, CPU)}
_NO_KIND = ("auto", "gpu", "meta")  # no package is asked for these


def kind_of(name: str) -> DeviceKind:
    """Return the kind with torch's name `name`; the CPU's for an unknown one."""
    if name in KINDS or name in _NO_KIND:
        return KINDS.get(name, CPU)
    return outside_kinds().get(name, CPU)


def is_kind(name: str) -> bool:
    """Return whether the kind exists; packages with kinds are only loaded for an unknown one."""
    return name in KINDS or name in outside_kinds()


@cache
def outside_kinds() -> dict[str, DeviceKind]:
    """Return the kinds that other packages add.

    A launch calls it only if a name is unknown or `device: auto` finds nothing.
    """
    return {name: one.load()() for name, one in extensions(DEVICES).items() if name not in KINDS}
