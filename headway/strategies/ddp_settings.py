"""Settings of DistributedDataParallel, and its communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.distributed.handler import KwargsHandler, TextEnum, check_choice
from headway.errors import Code, MachineError, UsageError

_CALL = "the script's DistributedDataParallelKwargs(...)"


class DDPCommunicationHookType(TextEnum):
    """DistributedDataParallel's communication hooks: no compression, fp16, bf16 or PowerSGD.

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


_NO, _FP16, _BF16, _POWER_SGD, _ = DDPCommunicationHookType
_HOOKS = (_NO, _FP16, _BF16, _POWER_SGD)  # torch's batched PowerSGD fails in its _orthogonalize

_NOT_OF_DDP = "comm_hook", "comm_wrapper", "comm_state_option", "compare_weights"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments for `torch.nn.parallel.DistributedDataParallel`; they have no effect with one rank.

    Args:
        dim: see `DistributedDataParallel` for this and the next six arguments.
        comm_hook: how gradients are compressed for the all-reduce: fp16, bf16 or PowerSGD
            (https://arxiv.org/abs/1905.13727).
        comm_wrapper: the precision in which a PowerSGD hook sends its matrices: fp16 or bf16.
        comm_state_option: arguments for torch's PowerSGDState; only for a PowerSGD hook.
        compare_weights: whether ranks compare the weights and hyperparameters of prepared objects;
            with fsdp, only the hyperparameters. They do this after 1, 2, 4, ..., 1024 optimizer
            steps, then every 1024 steps, at checkpoints, and in `end_training()`.

    Raises:
        UsageError: a hook or wrapper is unknown, or the `comm_` arguments are incompatible.

    Examples:
        >>> from headway import DistributedDataParallelKwargs
        >>> DistributedDataParallelKwargs(find_unused_parameters=True).to_kwargs()
        {'find_unused_parameters': True}
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = _NO
    comm_wrapper: DDPCommunicationHookType | str = _NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    compare_weights: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.comm_hook = _hook_type("comm_hook", self.comm_hook, _HOOKS)
        self.comm_wrapper = _hook_type("comm_wrapper", self.comm_wrapper, (_NO, _FP16, _BF16))
        if self.comm_wrapper is not _NO and self.comm_hook is _NO:
            raise UsageError(
                f"comm_wrapper is {self.comm_wrapper}, but there is no comm_hook to wrap",
                where=_CALL,
                fix=f"pass comm_hook=DDPCommunicationHookType.{self.comm_wrapper.name} instead",
                code=Code.CONTRADICTION,
            )
        if self.comm_state_option and self.comm_hook is not _POWER_SGD:
            raise UsageError(
                f"comm_state_option is for PowerSGD, but comm_hook is {self.comm_hook}",
                where=_CALL,
                fix="pass comm_hook=DDPCommunicationHookType.POWER_SGD, or omit comm_state_option",
                code=Code.CONTRADICTION,
            )

    def to_dict(self, ignore_keys: tuple[str, ...] = _NOT_OF_DDP) -> dict[str, Any]:
        """Return a copy of all fields but `ignore_keys`; the default keeps only DDP's arguments."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Register `comm_hook` with `model`; called by the Accelerator.

        Raises:
            MachineError: torch does not support the hook on this device, such as BF16 on CPUs.

        Examples:
            >>> import torch
            >>> import torch.distributed as dist
            >>> from headway import DistributedDataParallelKwargs
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
            >>> DistributedDataParallelKwargs(comm_hook="fp16").register_comm_hook(model)
            >>> dist.destroy_process_group()
        """
        if self.comm_hook is _NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        state: Any = model.process_group
        hook: Callable[..., Any]
        if self.comm_hook is _POWER_SGD:
            state = powerSGD_hook.PowerSGDState(state, **self.comm_state_option)
            hook = powerSGD_hook.powerSGD_hook
        else:
            hook = getattr(default_hooks, f"{self.comm_hook}_compress_hook")
        if self.comm_wrapper is not _NO:
            hook = getattr(default_hooks, f"{self.comm_wrapper}_compress_wrapper")(hook)
        try:
            model.register_comm_hook(state, hook)
        except TypeError as error:
            raise MachineError(
                f"torch does not support comm_hook {self.comm_hook} on this machine: {error}",
                where=_CALL,
                fix="pass comm_hook=DDPCommunicationHookType.FP16, or omit comm_hook",
                code=Code.UNSUPPORTED_HERE,
            ) from error


def _hook_type(
    name: str, value: object, choices: tuple[DDPCommunicationHookType, ...]
) -> DDPCommunicationHookType:
    text = getattr(value, "value", value)
    fix = f"pass {name}=DDPCommunicationHookType.BF16, or another supported type"
    known = [choice.value for choice in choices]
    check_choice("DistributedDataParallelKwargs", known, fix, **{name: text})
    return DDPCommunicationHookType(text)
