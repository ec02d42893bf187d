"""Intel's GPUs, which torch calls xpu."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.devices.kind import GpuKind, Lack

if TYPE_CHECKING:
    import torch

    from headway.contract.choices import NumberFormat
    from headway.machine.source import Source

_NODES = "sys/class/drm"
_INTEGRATED = "0000:00:02.0"  # where Intel's chipsets have it
_HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
_TWO_TILES = ("0BD0", "0BD5", "0BD6", "0BD7", "0BD8")
"""Data Center GPU Max with two tiles; all others have one. Source: pci.ids, Ponte Vecchio."""

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
    variables: Mapping[str, tuple[str, str]] = {_HIERARCHY: _WHOLE}
    resource = "gpu.intel.com/i915"
    tool = "xpu-smi"
    wheels = "xpu"

    def found_in(self, files: Source) -> list[dict[str, Any]]:
        slots = {}
        for node in (name for name in files.names_in(_NODES) if "render" in name):
            lines = files.read(f"{_NODES}/{node}/device/uevent").splitlines()
            facts = dict(line.partition("=")[::2] for line in lines)
            vendor, _, model = facts.get("PCI_ID", "").partition(":")
            maker = f"0x{vendor}" if model else files.read(f"{_NODES}/{node}/device/vendor").strip()
            if maker == "0x8086":
                slots[facts.get("PCI_SLOT_NAME", node)] = model
        found = sorted(slots.keys() - {_INTEGRATED}) or sorted(slots)
        return [
            {
                "name": f"Intel GPU {slots[slot].lower()}".strip(),
                "uuid": slot,
                "tiles": 2 if slots[slot].upper() in _TWO_TILES else 1,
            }
            for slot in found
        ]

    def counted(self, found: list[dict[str, Any]], environ: Mapping[str, str]) -> list[Any]:
        """Return cards or tiles, as Level Zero counts them: a launch counts cards by default."""
        hierarchy = environ.get(_HIERARCHY, "" if self.mask in environ else "COMPOSITE")
        if hierarchy == "COMPOSITE":
            return found
        is_flat = hierarchy in ("FLAT", "COMBINED")  # otherwise the driver's default
        return [
            {
                **gpu,
                "uuid": gpu["uuid"] + f".{tile}" * (gpu["tiles"] > 1),
                "tiles": int(gpu["tiles"] == 1 and not is_flat),
            }
            for gpu in found
            for tile in range(gpu["tiles"])
        ]

    def lack_of(self, device: torch.device, precision: str, row: NumberFormat) -> Lack | None:
        there = self._part.get_device_properties(device)
        if precision != "fp16" or there.has_fp64:
            return None
        return Lack(
            f"torch's GradScaler needs float64, which this GPU ({there.name}) does not have",
            "bf16",
        )
