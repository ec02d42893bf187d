"""All device kinds in order of preference, and the kinds that entry points add."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from headway.devices.kind import DeviceKind, GpuKind, Unsupported, sm

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import torch

    from headway.ipc.choices import NumberFormat
    from headway.machine.facts import Gpu
    from headway.machine.source import Source

OF_DEVICES, OF_CLUSTERS = "headway.devices", "headway.clusters"
"""Entry point groups: `name = module:DeviceKind` and `name = module:CLUSTER`."""

_NODES = "sys/class/drm"
_INTEGRATED = "0000:00:02.0"  # the slot of Intel's integrated GPUs
_HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
_TWO_TILES = ("0BD0", "0BD5", "0BD6", "0BD7", "0BD8")
"""Models of Data Center GPU Max with two tiles. Source: pci.ids, Ponte Vecchio."""

_WHOLE = ("COMPOSITE", "each card is one device, as in the kernel's list")


class Cuda(GpuKind):
    """NVIDIA GPUs (CUDA) and AMD GPUs (ROCm)."""

    name = "cuda"
    label = "CUDA"
    maker = "NVIDIA"
    backend = "nccl"
    copies_ahead = True
    mask = "CUDA_VISIBLE_DEVICES"
    empty_mask = ""
    debug_variables: Mapping[str, str] = {"TORCH_NCCL_ENABLE_MONITORING": "0"}
    interfaces: Mapping[str, str] = {
        **GpuKind.interfaces,
        "NCCL_SOCKET_IFNAME": "=",  # an exact match, not a prefix
    }
    resource = "nvidia.com/gpu"
    tool = "nvidia-smi"

    def unsupported(
        self, precision: str, row: NumberFormat, gpus: Sequence[Gpu]
    ) -> Unsupported | None:
        for gpu in gpus:  # if a capability is unknown, the ranks check it
            if gpu.capability is not None and gpu.capability < row.capability:
                what = f"{gpu.name} ({sm(gpu.capability)}) does not support {precision}"
                return Unsupported(what, row.fallback)
        return None

    def event_recorder(self, device: torch.device) -> Callable[[Any], Any]:
        return partial(self._record, device)

    def _record(self, device: torch.device, event: Any) -> Any:
        """Record an event in the current stream of `device`, except during graph capture."""
        if self._part.is_current_stream_capturing():
            return None
        event = event or self._part.Event(enable_timing=True)
        event.record(self._part.current_stream(device))  # another device may be current
        return event

    def unsupported_on(
        self, device: torch.device, precision: str, row: NumberFormat
    ) -> Unsupported | None:  # pragma: needs a GPU
        import torch

        major, minor = self._part.get_device_capability(device)
        if torch.version.hip is not None or (major, minor) >= row.capability:
            return None
        name = self._part.get_device_name(device)
        return Unsupported(f"{name} (sm_{major}{minor}) does not support {precision}", row.fallback)


class Xpu(GpuKind):
    """Intel GPUs (Level Zero); integrated GPUs are used only if there are no other GPUs."""

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
        """Return the cards or tiles that Level Zero enumerates; a launch uses cards by default."""
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

    def unsupported_on(
        self, device: torch.device, precision: str, row: NumberFormat
    ) -> Unsupported | None:
        found = self._part.get_device_properties(device)
        if precision != "fp16" or found.has_fp64:
            return None
        return Unsupported(
            f"torch's GradScaler needs float64, which {found.name} does not support", "bf16"
        )


class Mps(DeviceKind):
    """Apple GPUs, for single-process runs, because torch does not support collectives on MPS."""

    name = "mps"
    label = "MPS"
    maker = "Apple"
    most_ranks = 1
    lacking = ()
    has_fp64 = False
    can_pin = False  # torch warns in every epoch
    variables: Mapping[str, tuple[str, str]] = {
        "PYTORCH_ENABLE_MPS_FALLBACK": ("1", "operators that MPS does not support run on the CPU")
    }

    def is_available(self) -> bool:
        import torch

        return torch.backends.mps.is_available()

    def count(self) -> int:
        return int(self.is_available())

    def empty_cache(self) -> None:
        if self.is_available():  # pragma: needs a Mac
            import torch

            torch.mps.empty_cache()

    def rng_state(
        self, device: torch.device | None = None
    ) -> torch.Tensor | None:  # pragma: needs a Mac
        import torch

        return torch.mps.get_rng_state()

    def set_rng_state(
        self, state: torch.Tensor, device: torch.device | None = None
    ) -> None:  # pragma: needs a Mac
        import torch

        torch.mps.set_rng_state(state)


CPU, CUDA, MPS = DeviceKind(), Cuda(), Mps()
KINDS: Mapping[str, DeviceKind] = {kind.name: kind for kind in (CUDA, Xpu(), MPS, CPU)}
_NO_KIND = ("auto", "gpu", "meta")  # not device kinds


def kind_of(name: str) -> DeviceKind:
    """Return the kind that torch calls `name`; the CPU kind if the name is unknown."""
    if name in KINDS or name in _NO_KIND:
        return KINDS.get(name, CPU)
    return extension_kinds().get(name, CPU)


def is_kind(name: str) -> bool:
    """Return whether a kind exists; extensions are loaded only for names not in `KINDS`."""
    return name in KINDS or name in extension_kinds()


@cache
def extension_kinds() -> dict[str, DeviceKind]:
    """Return the kinds added by other packages.

    A launch calls this only if a name is unknown or `device: auto` finds no GPU.
    """
    return {name: ext.load()() for name, ext in extensions(OF_DEVICES).items() if name not in KINDS}


@cache
def extensions(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, without loading them.

    A launch calls this only if a name is unknown or `device: auto` finds no GPU.
    """
    if not _has_entry_points(group):  # importlib.metadata takes longer to import than argparse
        return {}
    from importlib.metadata import entry_points

    return {found.name: found for found in entry_points(group=group)}


def _has_entry_points(group: str) -> bool:
    """Return whether an installed package has entry points in `group`."""
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
            except OSError:  # most packages have no entry points
                continue
    return False
