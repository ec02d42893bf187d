"""All kinds of devices, the best first."""

from __future__ import annotations

from headway.devices.cpu import Cpu
from headway.devices.cuda import Cuda
from headway.devices.kind import DeviceKind
from headway.devices.mps import Mps
from headway.devices.xpu import Xpu

CPU, CUDA, MPS = Cpu(), Cuda(), Mps()
KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (CUDA, Xpu(), MPS, CPU)}


def kind_of(name: str) -> DeviceKind:
    """Return the kind with torch's name `name`; the CPU's for one that is not in the table."""
    return KINDS.get(name, CPU)
