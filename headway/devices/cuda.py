"""NVIDIA's GPUs, and AMD's, which torch also calls cuda."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.devices.kind import GpuKind, Lack, sm

if TYPE_CHECKING:
    import torch

    from headway.contract.choices import NumberFormat
    from headway.machine.facts import Gpu


class Cuda(GpuKind):
    """GPUs that CUDA or ROCm shows."""

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
        "NCCL_SOCKET_IFNAME": "=",  # exactly this one, not all that begin so
    }
    resource = "nvidia.com/gpu"
    tool = "nvidia-smi"

    def lack(self, precision: str, row: NumberFormat, gpus: Sequence[Gpu]) -> Lack | None:
        for gpu in gpus:  # of one whose capability is unknown, the ranks ask torch
            if gpu.capability is not None and gpu.capability < row.capability:
                what = f"{gpu.name} ({sm(gpu.capability)}) does not support {precision}"
                return Lack(what, row.instead)
        return None

    def event_recorder(self, device: torch.device) -> Callable[[Any], Any]:
        return partial(self._record, device)

    def _record(self, device: torch.device, event: Any) -> Any:
        """Put an event into the current stream of `device`; a graph keeps those it captures."""
        if self._part.is_current_stream_capturing():
            return None
        event = event or self._part.Event(enable_timing=True)
        event.record(self._part.current_stream(device))  # another device may be the current one
        return event

    def lack_of(
        self, device: torch.device, precision: str, row: NumberFormat
    ) -> Lack | None:  # pragma: needs a GPU
        import torch

        major, minor = self._part.get_device_capability(device)
        if torch.version.hip is not None or (major, minor) >= row.capability:
            return None
        name = self._part.get_device_name(device)
        return Lack(f"this GPU ({name}, sm_{major}{minor}) has no {precision}", row.instead)
