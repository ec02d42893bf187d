"""A fake GPU: `cpu:1` replaces `cuda`.

Without CUDA, torch cannot run a backward pass on fake tensors on `cuda`, but it can on a second CPU
device, whose memory is counted separately from the host's. torch.cuda's queries return values for
the fake GPU; functions without a relevant result do nothing.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from headway.estimate.child.patching import nothing, replace, replace_everywhere

FAKE_GPU = torch.device("cpu", 1)
_CAPABILITY = (9, 0)
_GPUS = ("cuda", "mps")
_OF_VALUES = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_TRUE = (
    *("is_available", "is_initialized", "is_bf16_supported", "is_tf32_supported"),
    "can_device_access_peer",
)


class GpuNames(TorchFunctionMode):
    """Replaces `cuda` with another device in the arguments of torch's functions."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = self.replaced(kwargs["device"])
        elif func is torch.Tensor.to and len(args) > 1:
            args = (args[0], self.replaced(args[1]), *args[2:])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        result = func(*args, **kwargs)
        if func not in _OF_VALUES:
            return result
        place = kwargs.get("device")  # for `cpu:1`, torch creates tensors on `cpu`
        if place is None and isinstance(args[0], torch.Tensor):  # new_tensor(), or a copy
            place = args[0].device
        return result.to(place)

    def replaced(self, device: Any) -> Any:
        """Return the replacement for `device`; all forms that torch accepts are supported."""
        if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
            return device
        if isinstance(device, int) or torch.device(device).type in _GPUS:
            return self._device
        return device


def patch_module_moves(observe: Callable[[torch.Tensor], None]) -> None:
    """Patch `Module.to()` and similar methods to change fake parameters in place.

    torch would swap the parameters instead, but a swap fails while a parameter has a weak
    reference, such as the ledger's.
    """

    def apply(
        self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> torch.nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        for parameter in self._parameters.values():
            if parameter is not None:
                _change(parameter, fn, observe)
                if parameter.grad is not None:
                    _change(parameter.grad, fn, observe)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    replace(torch.nn.Module, "_apply", apply)


def _change(
    tensor: Any, fn: Callable[[torch.Tensor], torch.Tensor], observe: Callable[[torch.Tensor], None]
) -> None:
    with torch.no_grad():
        changed = fn(tensor)
        device = changed.device
        if changed.dtype is not tensor.dtype:
            if isinstance(changed, FakeTensor):
                changed.fake_device = tensor.device
            tensor.data = changed
        if isinstance(tensor, FakeTensor):
            tensor.fake_device = device
        elif changed is not tensor:
            tensor.data = changed
    observe(tensor)


def patch_load_device(device: torch.device) -> None:
    """Patch `torch.load` to load tensors to `device` if they were saved on a GPU or mapped to one.

    Relies on `torch._utils._restore_device_fake_mode`, which is private.
    """
    restore = torch._utils._restore_device_fake_mode

    def restored(tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = restore(tensor)  # type: ignore[no-untyped-call]
        if isinstance(found, FakeTensor) and found.fake_device.type in _GPUS:
            found.fake_device = device
        return found

    replace(torch._utils, "_restore_device_fake_mode", restored)


def patch_cuda(name: str, memory_bytes: int, count: int) -> None:
    """Patch torch.cuda and torch.accelerator: queries report these GPUs; other calls do nothing."""
    major, minor = _CAPABILITY
    answers: dict[str, Any] = {
        **dict.fromkeys(_TRUE, True),
        **dict.fromkeys(("memory_summary", "list_gpu_processes"), ""),
        **dict.fromkeys(("mem_get_info", "get_memory_info"), (memory_bytes, memory_bytes)),
        "is_current_stream_capturing": False,  # queried by optimizers if torch has CUDA
        "memory_snapshot": [],
        "get_per_process_memory_fraction": 1.0,
        "device_count": count,
        "get_device_name": name,
        "get_device_capability": _CAPABILITY,
        "get_device_properties": types.SimpleNamespace(
            name=name,
            total_memory=memory_bytes,
            major=major,
            minor=minor,
            multi_processor_count=132,
        ),
        "get_arch_list": [f"sm_{major}{minor}"],
        "current_accelerator": torch.device("cuda"),
    }
    for module in (torch.cuda, torch.accelerator):
        for function in module.__all__:
            if inspect.isfunction(getattr(module, function)):
                unasked: Any = {} if "memory_stats" in function else 0
                replace(module, function, _returning(answers.get(function, unasked)))
        replace(module, "current_stream", _FakeStream)
    for function in ("Event", "Stream", "default_stream"):
        replace(torch.cuda, function, _FakeStream)
    for function in ("stream", "device"):
        replace(torch.cuda, function, lambda *_, **__: nullcontext())
    replace(torch.cuda, "_lazy_init", nothing)
    replace(torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    replace(torch.cuda, "get_rng_state_all", lambda: [torch.get_rng_state()])
    replace(torch.version, "cuda", torch.version.cuda or "12.8")


def _returning(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


class _FakeStream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.wait_stream = self.wait_event = self.wait = self.record = self.synchronize = nothing
        self.record_event = _FakeStream
        self.is_capturing = _returning(False)
        self.query = _returning(True)
        self.elapsed_time = _returning(1.0)


def patch_autocast() -> None:
    """Patch `torch.autocast("cuda")` to autocast on the fake GPU."""
    made = torch.autocast.__init__

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if device_type in _GPUS:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        made(self, device_type, dtype, *args, **kwargs)

    replace(torch.autocast, "__init__", init)


def patch_optimizer_defaults() -> None:
    """Patch optimizers to use foreach, their default on CUDA.

    Relies on `_default_to_fused_or_foreach`, which torch's optimizers import by name.
    """

    def choose(params: Any, differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:
        return False, not differentiable

    replace_everywhere("_default_to_fused_or_foreach", choose)
