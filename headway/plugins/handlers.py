"""The handlers of an Accelerator: what it is told about parts of torch, compilation included."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from headway.errors import MachineError, UsageError

CALL = "the script's Accelerator(...)"


class KwargsHandler:
    """Keyword arguments for one part of torch; `Accelerator(kwargs_handlers=[...])` takes several.

    Every handler is a dataclass whose fields all have a default.

    Examples:
        >>> from headway.utils import AutocastKwargs
        >>> AutocastKwargs(enabled=False).to_dict()
        {'enabled': False, 'cache_enabled': None}
        >>> AutocastKwargs(enabled=False).to_kwargs()
        {'enabled': False}
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields."""
        return {one.name: copy.deepcopy(getattr(self, one.name)) for one in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return a copy of the fields that differ from their defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


Handler = TypeVar("Handler", bound=KwargsHandler)


class Handlers:
    """The handlers that one Accelerator got, at most one of each kind."""

    def __init__(
        self, handlers: Sequence[KwargsHandler] | None, kinds: Sequence[type[KwargsHandler]]
    ) -> None:
        self._by_kind: dict[type[KwargsHandler], KwargsHandler] = {}
        if isinstance(handlers, KwargsHandler):
            raise UsageError(
                f"kwargs_handlers is a {type(handlers).__name__}, not a list",
                where=CALL,
                fix=f"pass kwargs_handlers=[{type(handlers).__name__}(...)]",
            )
        for handler in handlers or ():
            kind = next((one for one in kinds if isinstance(handler, one)), None)
            if kind is None:
                raise UsageError(
                    f"kwargs_handlers has a {type(handler).__name__}, which is no handler",
                    where=CALL,
                    fix=f"pass objects of {', '.join(one.__name__ for one in kinds)}",
                )
            if kind in self._by_kind:
                raise UsageError(
                    f"kwargs_handlers has two {kind.__name__}",
                    where=CALL,
                    fix="pass one of them, with the values of both",
                )
            self._by_kind[kind] = handler

    def of(self, kind: type[Handler]) -> Handler | None:
        """Return the handler of this kind; None if there is none."""
        found = self._by_kind.get(kind)
        return found if isinstance(found, kind) else None

    def or_default(self, kind: type[Handler]) -> Handler:
        """Return the handler of this kind, or one with the default values."""
        return self.of(kind) or kind()


class DDPCommunicationHookType(Enum):
    """How DistributedDataParallel exchanges gradients: as they are, or compressed.

    Examples:
        >>> from headway import DistributedDataParallelKwargs
        >>> DistributedDataParallelKwargs(comm_hook="bf16").comm_hook
        <DDPCommunicationHookType.BF16: 'bf16'>
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"

    def __str__(self) -> str:
        return self.value


_NO_HOOK = DDPCommunicationHookType.NO
_POWER_SGD = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
_WRAPPERS = (_NO_HOOK, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How models are wrapped in `torch.nn.parallel.DistributedDataParallel`; nothing with one rank.

    Args:
        dim: as torch's argument of the same name, like the six after it.
        comm_hook: how gradients are exchanged: in fp16, in bf16, or by PowerSGD
            (https://arxiv.org/abs/1905.13727).
        comm_wrapper: the precision in which a PowerSGD hook sends its matrices: fp16 or bf16.
        comm_state_option: arguments for torch's PowerSGDState, with a PowerSGD hook only.

    Raises:
        UsageError: a hook or wrapper is unknown, or the three do not go together.

    Examples:
        >>> from headway import DistributedDataParallelKwargs
        >>> DistributedDataParallelKwargs(find_unused_parameters=True).to_kwargs()
        {'find_unused_parameters': True}
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = _NO_HOOK
    comm_wrapper: DDPCommunicationHookType | str = _NO_HOOK
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = _hook_type("comm_hook", self.comm_hook, tuple(DDPCommunicationHookType))
        self.comm_wrapper = _hook_type("comm_wrapper", self.comm_wrapper, _WRAPPERS)
        if self.comm_wrapper is not _NO_HOOK and self.comm_hook is _NO_HOOK:
            raise UsageError(
                f"comm_wrapper is {self.comm_wrapper}, but there is no comm_hook to wrap",
                where="the script's DistributedDataParallelKwargs(...)",
                fix=f"pass comm_hook=DDPCommunicationHookType.{self.comm_wrapper.name} instead",
            )
        if self.comm_state_option and self.comm_hook not in _POWER_SGD:
            raise UsageError(
                f"comm_state_option is for PowerSGD, but comm_hook is {self.comm_hook}",
                where="the script's DistributedDataParallelKwargs(...)",
                fix="pass comm_hook=DDPCommunicationHookType.POWER_SGD, or no comm_state_option",
            )

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return a copy of all fields but `ignore_keys`: those that DDP itself takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Let `model` exchange gradients as `comm_hook` says; the Accelerator calls it.

        Raises:
            MachineError: torch has the hook for other devices only, such as BF16 for GPUs.
            UsageError: the hook is batched PowerSGD, which fails in torch.

        Examples:
            >>> import torch
            >>> import torch.distributed as dist
            >>> from headway import DistributedDataParallelKwargs
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
            >>> DistributedDataParallelKwargs(comm_hook="fp16").register_comm_hook(model)
            >>> dist.destroy_process_group()
        """
        if self.comm_hook is _NO_HOOK:
            return
        if self.comm_hook is DDPCommunicationHookType.BATCHED_POWER_SGD:
            raise UsageError(
                "comm_hook is batched_power_sgd, which stops at an assertion in torch"
                " (_orthogonalize) once its first steps without compression are over",
                where="the script's DistributedDataParallelKwargs(...)",
                fix="pass comm_hook=DDPCommunicationHookType.POWER_SGD",
            )
        state, hook = self._state_and_hook(model)
        try:
            model.register_comm_hook(state, hook)
        except TypeError as error:
            raise MachineError(
                f"comm_hook is {self.comm_hook}, which torch does not have here: {error}",
                where="the script's DistributedDataParallelKwargs(...)",
                fix="pass comm_hook=DDPCommunicationHookType.FP16, or none",
            ) from error

    def _state_and_hook(
        self, model: torch.nn.parallel.DistributedDataParallel
    ) -> tuple[Any, Callable[..., Any]]:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[Any, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
        }
        wrappers: dict[Any, Callable[..., Any]] = {
            _NO_HOOK: lambda hook: hook,
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
        }
        hook = wrappers[self.comm_wrapper](hooks[self.comm_hook])
        if self.comm_hook not in _POWER_SGD:
            return model.process_group, hook
        return powerSGD_hook.PowerSGDState(model.process_group, **self.comm_state_option), hook


def _hook_type(
    name: str, value: object, choices: tuple[DDPCommunicationHookType, ...]
) -> DDPCommunicationHookType:
    for choice in choices:
        if value in (choice, choice.value):
            return choice
    raise UsageError(
        f"{name} is {value!r}, not one of {', '.join(map(str, choices))}",
        where="the script's DistributedDataParallelKwargs(...)",
        fix=f"pass {name}=DDPCommunicationHookType.BF16, or another of them",
    )


@dataclass
class GradScalerKwargs(KwargsHandler):
    """The loss scale of fp16, as `torch.amp.GradScaler` takes it; other precisions have none.

    Args:
        init_scale: the first loss scale.
        growth_factor: by how much it grows after `growth_interval` steps without overflow.
        backoff_factor: by how much it is multiplied after an overflow.
        growth_interval: a number of optimizer steps.
        enabled: False computes in fp16 without loss scale.

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


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the ranks form their process group; nothing with one rank.

    Args:
        backend: a backend of torch.distributed; "nccl", the default, stands for what the device
            needs: NCCL on GPUs, gloo on CPUs.
        init_method: where the ranks find each other; None reads it from the environment, where the
            launcher has put it.
        timeout: how long a collective may wait; None is torch's: 10 minutes with NCCL, 30 with
            gloo. It also holds for a group that exists already.

    Examples:
        >>> from datetime import timedelta
        >>> from headway import InitProcessGroupKwargs
        >>> InitProcessGroupKwargs(timeout=timedelta(hours=1)).to_kwargs()
        {'timeout': datetime.timedelta(seconds=3600)}
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class AutocastKwargs(KwargsHandler):
    """How `torch.autocast` computes in prepared models and under `accelerator.autocast()`.

    Args:
        enabled: False computes in the dtypes of weights and inputs.
        cache_enabled: whether weights are cast once for all their uses in a forward pass; None is
            torch's default.

    Examples:
        >>> from headway import AutocastKwargs
        >>> AutocastKwargs(enabled=False).to_kwargs()
        {'enabled': False}
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients accumulate over micro-batches; in place of `gradient_accumulation_steps`.

    Args:
        num_steps: micro-batches in one optimizer step; None is what the launcher says, else 1.
        adjust_scheduler: whether the schedule is written in optimizer steps. The learning rates are
            the same either way, as in Accelerate: a prepared scheduler never steps while
            gradients accumulate.
        sync_with_dataloader: the last batch of a loader makes an optimizer step, and begins the
            count anew. With False the count goes on over epochs.
        sync_each_batch: ranks exchange gradients in every backward pass: slower, but without the
            memory that unexchanged gradients need in some strategies.

    Raises:
        UsageError: `num_steps` is not a whole number of at least 1.

    Examples:
        >>> from headway.utils import GradientAccumulationPlugin
        >>> GradientAccumulationPlugin(num_steps=4).to_kwargs()
        {'num_steps': 4}
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            check_steps("num_steps", self.num_steps, "the script's GradientAccumulationPlugin(...)")


def check_steps(name: str, steps: object, where: str) -> None:
    """Raise UsageError unless `steps` is a number of micro-batches."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(
            f"{name} is {steps!r}, not a whole number of at least 1",
            where=where,
            fix="pass the number of micro-batches in one optimizer step",
        )


@dataclass
class ProfileKwargs(KwargsHandler):
    """What `accelerator.profile()` records, as `torch.profiler.profile` takes it.

    Args:
        activities: of `cpu`, `cuda`, `mtia`, `xpu` and the others that torch has; None records all
            that this machine has.
        schedule_option: arguments for `torch.profiler.schedule`: `wait`, `warmup`, `active`,
            `repeat` and `skip_first`, each a number of `profiler.step()` calls.
        on_trace_ready: called with the profiler each time that the schedule has recorded a cycle,
            and without a schedule at the end.
        record_shapes: record the shapes of inputs.
        profile_memory: record allocations.
        with_stack: record source lines.
        with_flops: estimate the floating-point operations of matrix products and convolutions.
        with_modules: record the names of modules; torch has this for TorchScript only.
        output_trace_dir: a folder for the trace of each rank, `profile_<rank>.json`, as Chrome's
            tracing and Perfetto read them.

    Examples:
        >>> import torch
        >>> from headway import ProfileKwargs
        >>> handler = ProfileKwargs(activities=["cpu"], record_shapes=True)
        >>> with handler.build() as profiler:
        ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> "aten::mm" in {one.key for one in profiler.key_averages()}
        True
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """Return the profiler, a context that has not begun.

        Raises:
            UsageError: an activity, or a key of `schedule_option`, is unknown.
        """
        return torch.profiler.profile(
            activities=None if self.activities is None else list(map(_activity, self.activities)),
            schedule=None if self.schedule_option is None else _schedule(self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _activity(name: str) -> torch.profiler.ProfilerActivity:
    known = torch.profiler.ProfilerActivity.__members__
    if name.upper() not in known:
        raise UsageError(
            f"activities has {name!r}, which torch's profiler does not know",
            where="the script's ProfileKwargs(...)",
            fix=f"pass some of {', '.join(sorted(map(str.lower, known)))}",
        )
    return known[name.upper()]


def _schedule(options: dict[str, int]) -> Callable[[int], torch.profiler.ProfilerAction]:
    try:
        return torch.profiler.schedule(**options)
    except (TypeError, AssertionError) as error:
        raise UsageError(
            f"schedule_option is {options!r}: {error}",
            where="the script's ProfileKwargs(...)",
            fix="pass wait, warmup and active, and if need be repeat and skip_first",
        ) from None


TRACE_NAME = "profile_{rank}.json"


@contextmanager
def profiled(handler: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Record what the block does; with a schedule, the file has its last cycle."""
    if handler.output_trace_dir is None:
        with handler.build() as profiler:
            yield profiler
        return
    folder = Path(handler.output_trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / TRACE_NAME.format(rank=rank)
    is_written = False

    def write_trace(profiler: torch.profiler.profile) -> None:
        nonlocal is_written
        if handler.on_trace_ready is not None:
            handler.on_trace_ready(profiler)
        profiler.export_chrome_trace(str(trace))
        is_written = True

    with replace(handler, on_trace_ready=write_trace).build() as profiler:
        yield profiler
    if not is_written:
        warnings.warn(
            f"no trace in {trace}: the schedule {handler.schedule_option} recorded nothing."
            " Call profiler.step() after each step, or record earlier",
            stacklevel=3,
        )


class DynamoBackend(str, Enum):
    """The usual backends of `torch.compile`; a name that torch has registered does as well.

    Examples:
        >>> from headway.utils import DynamoBackend, TorchDynamoPlugin
        >>> TorchDynamoPlugin(backend="eager").backend is DynamoBackend.EAGER
        True
    """

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"

    def __str__(self) -> str:
        return self.value


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How prepared models are compiled with `torch.compile`.

    Args:
        backend: a `DynamoBackend`, the name of a backend that torch has registered (case does not
            matter for the usual ones), or a function; None and "no" do not compile.
        mode: "default", "reduce-overhead" or "max-autotune"; None is "default".
        fullgraph: whether a graph break is an error; None is False.
        dynamic: whether to compile for changing shapes; None lets torch find out.
        options: options of the backend, in place of a mode.
        disable: make `torch.compile` do nothing.
        use_regional_compilation: compile each block that the model repeats, such as a layer of a
            transformer, in place of the whole model: the code of one block serves for all.

    Examples:
        >>> from headway.utils import TorchDynamoPlugin
        >>> TorchDynamoPlugin(backend="inductor", dynamic=True).to_kwargs()
        {'backend': 'inductor', 'dynamic': True}
        >>> TorchDynamoPlugin(backend="inductor").to_dict()["backend"]
        'inductor'
    """

    backend: DynamoBackend | str | Callable[..., Any] | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        if self.backend is None:
            self.backend = DynamoBackend.NO
        elif isinstance(self.backend, str) and self.backend.upper() in set(DynamoBackend):
            self.backend = DynamoBackend(self.backend.upper())

    @property
    def compiles(self) -> bool:
        """Whether models are compiled at all."""
        return self.backend is not DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields, the backend as torch calls it."""
        found = super().to_dict()
        if isinstance(self.backend, DynamoBackend):
            found["backend"] = self.backend.value.lower()
        return found

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile` that differ from their defaults."""
        found = super().to_kwargs()
        found.pop("use_regional_compilation", None)
        return found
