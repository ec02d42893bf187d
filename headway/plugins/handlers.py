"""The handlers for DistributedDataParallel, GradScaler, process groups and autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

import torch

from headway.errors import MachineError, UsageError
from headway.plugins.handler import KwargsHandler


class DDPCommunicationHookType(Enum):
    """How DistributedDataParallel exchanges gradients: as they are, or compressed."""

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

    Example:
        >>> handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        >>> handler.to_kwargs()
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
        """Let `model` exchange gradients as `comm_hook` says.

        Raises:
            MachineError: torch has the hook for other devices only, such as BF16 for GPUs.
            UsageError: the hook is batched PowerSGD, which fails in torch.
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

    Example:
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

    Example:
        >>> handler = InitProcessGroupKwargs(timeout=timedelta(hours=1))
        >>> handler.to_kwargs()
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

    Example:
        >>> AutocastKwargs(enabled=False).to_kwargs()
        {'enabled': False}
    """

    enabled: bool = True
    cache_enabled: bool | None = None
