"""Number formats: `Precision` is complete for fp32; bf16 and fp16 override what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from headway.collectives import for_each_tensor
from headway.errors import MachineError, UsageError
from headway.machine.apple import why_no_precision
from headway.machine.detection import detect_machine


def precision_for(name: str, device: torch.device, *, where: str) -> Precision:
    """Return the precision called `name` (no, fp16, bf16) for `device`.

    Args:
        where: where the name came from, for messages.

    Raises:
        UsageError: fp16 on a CPU.
        MachineError: a precision that this GPU, or torch's MPS, has not.
    """
    if name == "fp16" and device.type == "cpu":
        raise UsageError(
            "mixed_precision is 'fp16', but the device is the CPU, where fp16 gains nothing",
            where=where,
            fix="use bf16, which CPUs can compute with, or no",
        )
    if name == "bf16" and device.type == "cuda":
        _require_bf16(device, where)
    if device.type == "mps":
        _require_on_mps(name, where)
    return {"no": Precision, "bf16": Bf16, "fp16": Fp16}[name](device)


class Precision:
    """Weights, activations and gradients in the script's own dtypes, which are fp32 as a rule."""

    name = "no"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which a forward pass is computed."""
        return nullcontext()

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make every call of `model` compute in this precision."""
        return model

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Add the gradients of `loss` to the parameters."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def loss_scale(self) -> float:
        """Return how many times their true size gradients have until they are unscaled."""
        return 1.0

    def unscale(self, optimizers: Iterable[Optimizer], tensors: Iterable[torch.Tensor]) -> None:
        """Bring the gradients of those optimizers that own `tensors` to their true size."""

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> bool:
        """Let `optimizer` step; return whether it did not, because gradients overflowed."""
        optimizer.step(closure)
        return False

    def gradients_dropped(self, optimizer: Optimizer) -> None:
        """Learn that the gradients of `optimizer` were set to zero."""


class Bf16(Precision):
    """Forward passes under autocast to bfloat16; weights and gradients stay in fp32."""

    name = "bf16"
    dtype = torch.bfloat16

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, dtype=self.dtype)

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if not isinstance(model.forward, _AutocastForward):
            model.forward = _AutocastForward(model.forward, self._device.type, self.dtype)
        return model


class Fp16(Bf16):
    """Forward passes under autocast to float16, with a loss scale that adapts to overflows.

    The scale changes at the first backward pass after a step, so that several optimizers may step
    on the gradients of one backward pass.
    """

    name = "fp16"
    dtype = torch.float16

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._scaler = torch.amp.GradScaler(device.type)
        self._unscaled: list[Optimizer] = []
        self._has_stepped = False

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if self._has_stepped:
            self._adapt_scale()
        super().backward(self._scaler.scale(loss), **kwargs)

    def loss_scale(self) -> float:
        return self._scaler.get_scale()

    def unscale(self, optimizers: Iterable[Optimizer], tensors: Iterable[torch.Tensor]) -> None:
        wanted = set(map(id, tensors))
        for optimizer in optimizers:
            owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
            if optimizer not in self._unscaled and owned & wanted:
                self._scaler.unscale_(optimizer)
                self._unscaled.append(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> bool:
        if closure is not None:
            raise UsageError(
                "optimizer.step() got a closure, which fp16's loss scale cannot work with",
                where="mixed_precision 'fp16'",
                fix="use mixed_precision bf16, or an optimizer without closure",
            )
        steps: list[bool] = []

        def note_step(optimizer: Optimizer, *_: Any) -> None:
            # fused optimizers are called in any case, and skip the step themselves on found_inf
            steps.append(not bool(getattr(optimizer, "found_inf", False)))

        hook = optimizer.register_step_pre_hook(note_step)
        try:
            self._scaler.step(optimizer)
        finally:
            hook.remove()
        self._has_stepped = True
        return not any(steps)

    def gradients_dropped(self, optimizer: Optimizer) -> None:
        if optimizer in self._unscaled:
            self._adapt_scale()

    def _adapt_scale(self) -> None:
        self._scaler.update()
        self._unscaled.clear()
        self._has_stepped = False


class _AutocastForward:
    """A model's forward under autocast, its half-precision outputs in fp32.

    An object and no closure, so that a copied or unpickled model calls its own forward.
    """

    def __init__(self, forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> None:
        self.__wrapped__ = forward  # what inspect.signature() looks at
        self._device_type = device_type
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype):
            outputs = self.__wrapped__(*args, **kwargs)
        return for_each_tensor(_to_fp32, outputs)


def restore_forward(model: torch.nn.Module) -> None:
    """Take back what `prepare_model` did to `model`."""
    if isinstance(model.forward, _AutocastForward):
        model.forward = model.forward.__wrapped__


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _require_bf16(device: torch.device, where: str) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and major < 8:
        raise MachineError(
            f"mixed_precision is 'bf16', but this GPU ({torch.cuda.get_device_name(device)},"
            f" sm_{major}{minor}) has no bf16",
            where=where,
            fix="use fp16, or no",
        )


def _require_on_mps(name: str, where: str) -> None:
    reason = why_no_precision(name, detect_machine())
    if reason is not None:
        raise MachineError(
            f"mixed_precision is {name!r}, but {reason}", where=where, fix="use no, or update"
        )
