"""Intel's GPUs, which torch calls xpu."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headway.devices.kind import GpuKind, Lack

if TYPE_CHECKING:
    import torch

    from headway.contract.precisions import NumberFormat
    from headway.machine.facts import Machine
    from headway.machine.source import Source

_NODES = "sys/class/drm"
_INTEGRATED = "0000:00:02.0"  # where Intel's chipsets have it
_WHOLE = ("COMPOSITE", "each card is one device, as the kernel lists them")


class Xpu(GpuKind):
    """GPUs that Level Zero shows; torch sees integrated ones only where there is no other."""

    name = "xpu"
    label = "XPU"
    maker = "Intel"
    distributed_type = "MULTI_XPU"
    backend = "xccl"
    has_fp64 = False  # Arc A cards
    mask = "ZE_AFFINITY_MASK"
    mask_is_ordered = False
    variables: Mapping[str, tuple[str, str]] = {"ZE_FLAT_DEVICE_HIERARCHY": _WHOLE}
    resource = "gpu.intel.com/i915"
    tool = "xpu-smi"
    wheels = "xpu"

    def found_in(self, files: Source) -> list[dict[str, Any]]:
        slots = {}
        for node in files.names_in(_NODES):
            lines = files.read(f"{_NODES}/{node}/device/uevent") if "render" in node else ""
            facts = dict(line.partition("=")[::2] for line in lines.splitlines())
            vendor, _, model = facts.get("PCI_ID", "").partition(":")
            if vendor == "8086":
                slots[facts.get("PCI_SLOT_NAME", node)] = f"Intel GPU {model.lower()}"
        found = sorted(slots.keys() - {_INTEGRATED}) or sorted(slots)
        return [
            {"name": slots[slot], "uuid": slot, "memory_bytes": 0, "capability": (0, 0)}
            for slot in found
        ]

    def lack_of(
        self, device: torch.device, precision: str, row: NumberFormat, look: Callable[[], Machine]
    ) -> Lack | None:
        there = self._part.get_device_properties(device)
        if precision != "fp16" or there.has_fp64:
            return None
        return Lack(
            f"torch's GradScaler needs float64, which this GPU ({there.name}) does not have",
            "bf16",
        )
