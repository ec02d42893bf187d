"""The CPU."""

from __future__ import annotations

from headway.devices.kind import DeviceKind


class Cpu(DeviceKind):
    """All cores of a machine, shared by any number of ranks."""

    lacking = ("fp16",)
