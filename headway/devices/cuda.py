"""NVIDIA's GPUs, and AMD's, which torch also calls cuda."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.devices.kind import Facts, GpuFacts, GpuKind, Lack

if TYPE_CHECKING:
    import torch


class Cuda(GpuKind):
    """GPUs that CUDA or ROCm shows."""

    name = "cuda"
    label = "CUDA"
    maker = "NVIDIA"
    distributed_type = "MULTI_GPU"
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

    def lack(self, precision: str, machine: Facts, gpus: Sequence[GpuFacts]) -> Lack | None:
        old = [gpu for gpu in gpus if gpu.capability < (8, 0)]
        if precision != "bf16" or not old:
            return None
        compute = "sm_" + "".join(map(str, old[0].capability))
        return Lack(f"{old[0].name} ({compute}) does not support bf16", "fp16")

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
        self, device: torch.device, precision: str, look: Callable[[], Facts]
    ) -> Lack | None:  # pragma: needs a GPU
        import torch

        major, minor = self._part.get_device_capability(device)
        if precision != "bf16" or torch.version.hip is not None or major >= 8:
            return None
        name = self._part.get_device_name(device)
        return Lack(f"this GPU ({name}, sm_{major}{minor}) has no bf16", "fp16")
