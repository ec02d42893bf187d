"""Mixed precision: the base class `Precision` for fp32, and its subclasses for bf16 and fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim import Optimizer

from headway.devices.table import kind_of
from headway.distributed.handler import KwargsHandler, TextEnum
from headway.distributed.nested import for_each_tensor
from headway.errors import Code, MachineError, UsageError
from headway.ipc.choices import PRECISIONS, NumberFormat, other_precisions


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments for `torch.autocast` in prepared models and `accelerator.autocast()`.

    Args:
        enabled: if False, models compute in the dtypes of weights and inputs.
        cache_enabled: whether cast weights are cached within a forward pass; None uses torch's
            default.

    Examples:
        >>> from headway import AutocastKwargs
        >>> AutocastKwargs(enabled=False).to_kwargs()
        {'enabled': False}
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments for `torch.amp.GradScaler` in fp16; they have no effect in other precisions.

    Args:
        init_scale: the initial loss scale.
        growth_factor: multiplies the scale after `growth_interval` steps without overflow.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: the number of optimizer steps without overflow after which the scale grows.
        enabled: if False, models compute in fp16 without loss scaling.

    Examples:
        >>> from headway import GradScalerKwargs
        >>> GradScalerKwargs(init_scale=1024.0, growth_interval=100).to_kwargs()
        {'init_scale': 1024.0, 'growth_interval': 100}
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


class PrecisionSettings(NamedTuple):
    autocast: AutocastKwargs = AutocastKwargs()
    scaler: GradScalerKwargs = GradScalerKwargs()


DEFAULTS = PrecisionSettings()


P = TypeVar("P", bound="Precision")


class Precision:
    """Computes in the script's dtypes, usually fp32; the base class of other precisions.

    Scripts can pass an instance of a subclass: `Accelerator(mixed_precision=MyPrecision())`. The
    Accelerator calls `set_up` before any other method.
    """

    name = "no"
    scaler: torch.amp.GradScaler | None = None  # adapts the loss scale

    def set_up(self: P, device: torch.device, settings: PrecisionSettings = DEFAULTS) -> P:
        """Set up this precision for `device`, and return self."""
        self._device = device
        self._settings = settings
        return self

    @property
    def number_format(self) -> NumberFormat:
        """The format that a device must support; by default, it is looked up in `PRECISIONS`."""
        return PRECISIONS.get(self.name) or NumberFormat(self.name, "float32")

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        return nullcontext()

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make every forward pass of `model` use this precision."""
        return model

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of `loss`."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def loss_scale(self) -> float:
        """Return the factor by which gradients are scaled until `unscale` is called."""
        return 1.0

    def unscale(self, optimizers: Iterable[Optimizer], tensors: Iterable[torch.Tensor]) -> None:
        """Divide the gradients of the optimizers that own `tensors` by the loss scale."""

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> bool:
        """Step `optimizer`; return whether the step was skipped due to an overflow."""
        if closure is None:
            optimizer.step()  # some custom optimizers do not take a closure
        else:
            optimizer.step(closure)
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes during training, which is the loss scale in fp16."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned in a run with the same precision."""

    def gradients_dropped(self, optimizer: Optimizer) -> None:
        """Record that the gradients of `optimizer` were reset."""


_HALF = (torch.float16, torch.bfloat16)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert all float16 and bfloat16 tensors in nested data to float32.

    Args:
        tensor: a tensor of any shape and dtype, or lists, tuples and mappings of tensors; other
            objects are returned unchanged.

    Examples:
        >>> import torch
        >>> from headway.utils import convert_to_fp32
        >>> convert_to_fp32([torch.ones(2, dtype=torch.bfloat16), "a text"])
        [tensor([1., 1.]), 'a text']
    """
    return for_each_tensor(lambda t: t.float() if t.dtype in _HALF else t, tensor)


class ConvertOutputsToFp32:
    """A forward function that converts its half-precision outputs to fp32.

    It can be pickled and copied if `model_forward` can be.

    Args:
        model_forward: any function; `convert_to_fp32` is applied to its result.

    Examples:
        >>> import torch
        >>> from headway.utils import ConvertOutputsToFp32
        >>> ConvertOutputsToFp32(torch.nn.Linear(2, 1).bfloat16())(
        ...     torch.ones(3, 2, dtype=torch.bfloat16)
        ... ).dtype
        torch.float32
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        update_wrapper(self, model_forward)
        self.__wrapped__ = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.__wrapped__(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Wrap `model_forward` to convert its half-precision outputs to fp32.

    Examples:
        >>> import torch
        >>> from headway.utils import convert_outputs_to_fp32
        >>> model = torch.nn.Linear(2, 1).half()
        >>> model.forward = convert_outputs_to_fp32(model.forward)
        >>> model(torch.ones(3, 2, dtype=torch.half)).dtype
        torch.float32
    """
    return ConvertOutputsToFp32(model_forward)


class Bf16(Precision):
    """Computes forward passes under autocast to bfloat16; weights and gradients stay in fp32."""

    name = "bf16"
    dtype = torch.bfloat16

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        return torch.autocast(*self._autocast_arguments(handler or self._settings.autocast))

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if not isinstance(model.forward, _AutocastForward):
            arguments = self._autocast_arguments(self._settings.autocast)
            model.forward = _AutocastForward(model.forward, arguments)
        return model

    def _autocast_arguments(self, handler: AutocastKwargs) -> _AutocastArguments:
        return self._device.type, self.dtype, handler.enabled, handler.cache_enabled


_AutocastArguments = tuple[str, torch.dtype, bool, bool | None]


class _AutocastForward:
    """A callable object instead of a closure, so that a copied model calls its own forward."""

    def __init__(self, forward: Callable[..., Any], arguments: _AutocastArguments) -> None:
        self.__wrapped__ = forward  # read by inspect.signature()
        self._arguments = arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(*self._arguments):
            outputs = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(outputs)


def restore_forward(model: torch.nn.Module) -> None:
    """Undo `prepare_model` or `convert_outputs_to_fp32`."""
    while isinstance(model.forward, (_AutocastForward, ConvertOutputsToFp32)):
        model.forward = model.forward.__wrapped__


class Fp16(Bf16):
    """Computes forward passes under autocast to float16, with dynamic loss scaling.

    The scale is updated in the first backward pass after a step, so that several optimizers can
    step on the gradients of the same backward pass.
    """

    name = "fp16"
    dtype = torch.float16

    scaler: torch.amp.GradScaler

    def set_up(self, device: torch.device, settings: PrecisionSettings = DEFAULTS) -> Fp16:
        super().set_up(device, settings)
        self._new_scaler = partial(torch.amp.GradScaler, device.type, **settings.scaler.to_dict())
        self.scaler = self._new_scaler()
        self._unscaled: list[Optimizer] = []
        self._has_stepped = False
        return self

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if self._has_stepped:
            self._adapt_scale()
        super().backward(self.scaler.scale(loss), **kwargs)

    def loss_scale(self) -> float:
        return self.scaler.get_scale()

    def unscale(self, optimizers: Iterable[Optimizer], tensors: Iterable[torch.Tensor]) -> None:
        wanted = set(map(id, tensors))
        for optimizer in optimizers:
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if optimizer not in self._unscaled and owned & wanted:
                self.scaler.unscale_(optimizer)
                self._unscaled.append(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> bool:
        if closure is not None:
            raise UsageError(
                "optimizer.step() got a closure, which fp16 loss scaling does not support",
                where="mixed_precision 'fp16'",
                fix="use mixed_precision='bf16', or an optimizer without a closure",
                code=Code.UNSUPPORTED,
            )
        steps: list[bool] = []

        def note_step(optimizer: Optimizer, *_: Any) -> None:
            # fused optimizers are always called, and skip the step themselves on found_inf
            steps.append(not bool(getattr(optimizer, "found_inf", False)))

        hook = optimizer.register_step_pre_hook(note_step)
        try:
            self.scaler.step(optimizer)
        finally:
            hook.remove()
        self._has_stepped = True
        return not any(steps)

    def gradients_dropped(self, optimizer: Optimizer) -> None:
        if optimizer in self._unscaled:
            self._adapt_scale()

    def state_dict(self) -> dict[str, Any]:
        if self._has_stepped:  # the next backward pass would do the same
            self._adapt_scale()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # in place, because scripts hold references; also drops the state of earlier gradients
        vars(self.scaler).update(vars(self._new_scaler()))
        self.scaler.load_state_dict(state)
        self._unscaled.clear()
        self._has_stepped = False

    def _adapt_scale(self) -> None:
        self.scaler.update()
        self._unscaled.clear()
        self._has_stepped = False


class PrecisionType(str, TextEnum):
    """Accelerate's choices of `mixed_precision`; each member equals its string.

    Examples:
        >>> from headway.utils import PrecisionType
        >>> PrecisionType.BF16 == "bf16", PrecisionType.list()
        (True, ['no', 'fp16', 'bf16'])
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def list(cls) -> list[str]:
        """Return the values of all members."""
        return [member.value for member in cls]


CLASSES = {kind.name: kind for kind in (Precision, Bf16, Fp16)}


def precision_for(
    chosen: str | Precision,
    device: torch.device,
    settings: PrecisionSettings = DEFAULTS,
    *,
    where: str,
) -> Precision:
    """Return the precision for `device`; if unsupported, raise an error that names `where`."""
    precision = CLASSES[chosen]() if isinstance(chosen, str) else chosen
    name, kind = precision.name, kind_of(device.type)
    fits = other_precisions(kind.lacking)
    if name in PRECISIONS and name not in ("no", *fits):
        raise UsageError(
            f"mixed_precision is {name!r}, but the device is the {kind.label}, where {name} has no"
            " benefit",
            where=where,
            fix=f"use {' or '.join(map(repr, [*reversed(fits), 'no']))}",
            code=Code.UNSUPPORTED_HERE,
        )
    unsupported = kind.unsupported_on(device, name, precision.number_format)
    if unsupported is not None:
        raise MachineError(
            f"mixed_precision is {name!r}, but {unsupported.reason}",
            where=where,
            fix=f"use {unsupported.instead!r} or 'no'",
            code=Code.UNSUPPORTED_HERE,
        )
    return precision.set_up(device, settings)
