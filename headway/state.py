"""Process-wide state: rank and device, precision, and gradient accumulation."""

from __future__ import annotations

from copy import copy
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist

from headway.data.active_loader import current_loop, open_loops
from headway.distributed.handler import checked
from headway.distributed.process import Process
from headway.distributed.world import (
    DistributedType,
    InitProcessGroupKwargs,
    World,
    group_backend,
    join_world,
    leave_world,
)
from headway.errors import Code, UsageError
from headway.ipc.run_contract import read_run
from headway.precision.precision import CLASSES, Precision
from headway.strategies.compilation import TorchDynamoPlugin
from headway.strategies.sharding import FullyShardedDataParallelPlugin
from headway.training.accumulation import Accumulation, GradientAccumulationPlugin
from headway.training.arguments import check_precision, merge_arguments, reject_unsupported

_CALL = "the script's AcceleratorState(...)"
_GROUP_ARGUMENTS = ("backend", "init_method", "timeout")


class PartialState(Process):
    """The rank and device of this process, which all instances and Accelerators share.

    The first instance, or the first Accelerator, selects the device and initializes the process
    group. An Accelerator is not required. An Accelerator that is created later uses the same
    device, unless its arguments select another device, which then applies to all instances.

    Args:
        cpu: use the CPU even if a GPU is available.
        backend: as in `InitProcessGroupKwargs`.
        init_method: as in `InitProcessGroupKwargs`.
        timeout: as in `InitProcessGroupKwargs`.

    Raises:
        UsageError: `cpu` or `backend` contradicts the existing state.
        MachineError, LaunchError: as for `Accelerator`.

    Examples:
        >>> from headway import PartialState
        >>> state = PartialState(cpu=True)
        >>> with state.split_between_processes(["a", "b"]) as prompts:
        ...     prompts
        ['a', 'b']
    """

    debug = fork_launched = False  # read by scripts written for Accelerate

    _shared_state: ClassVar[dict[str, Any]] = {}

    @checked
    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.__dict__ = self._shared_state
        settings = InitProcessGroupKwargs(backend, init_method, timeout)
        if not self.initialized:
            run, _ = merge_arguments(read_run(), cpu=cpu)
            super().__init__(join_world(run.device, settings))
            return
        if cpu and self.device.type != "cpu":
            raise _cannot_change("cpu=True", f"device {self.device}", "PartialState")
        if settings != InitProcessGroupKwargs(None) and dist.is_initialized():
            join_world(self.device, settings)

    @property
    def initialized(self) -> bool:
        """Whether the shared state has been set."""
        return bool(self._shared_state)

    @property
    def backend(self) -> str | None:
        """The process group's backend for `device`, such as "nccl"; None with one rank."""
        return group_backend(self.device) if self.use_distributed else None

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy a process group, by default the default group; a no-op if there is none.

        Examples:
            >>> from headway import PartialState
            >>> PartialState(cpu=True).destroy_process_group()
        """
        if group is None:
            leave_world()
        elif dist.is_initialized():
            dist.destroy_process_group(group)

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    def __getattr__(self, name: str) -> NoReturn:
        reason = "" if self.initialized else ": its state was reset; create a new instance"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{reason}")

    @staticmethod
    def _reset_state() -> None:
        """Reset the shared state, for tests, but keep the process group."""
        PartialState._shared_state.clear()


class AcceleratorState(PartialState):
    """A PartialState that also has the newest Accelerator's precision and compiler settings.

    Args:
        mixed_precision: `no`, `fp16` or `bf16`; None means the launcher's setting, or else `no`.
        cpu: use the CPU even if a GPU is available.
        dynamo_plugin: settings for compiling models.
        arguments: passed to PartialState; other arguments of Accelerate must be None.

    Raises:
        UsageError: an argument is unknown, or contradicts the existing state.

    Examples:
        >>> from headway.state import AcceleratorState
        >>> AcceleratorState(mixed_precision="bf16", cpu=True).mixed_precision
        'bf16'
    """

    deepspeed_plugin = None  # read by scripts written for Accelerate
    deepspeed_plugins = torch_tp_plugin = parallelism_config = device_mesh = None

    mixed_precision: str
    dynamo_plugin: TorchDynamoPlugin
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    _shared_state: ClassVar[dict[str, Any]] = {}

    @checked
    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        **arguments: Any,
    ) -> None:
        group = {name: arguments.pop(name) for name in _GROUP_ARGUMENTS if name in arguments}
        reject_unsupported(arguments, ("cpu", "mixed_precision", *_GROUP_ARGUMENTS), _CALL)
        check_precision(mixed_precision, "AcceleratorState")
        self.__dict__ = self._shared_state
        world = PartialState(cpu, **group).world
        if not self.initialized:
            run, _ = merge_arguments(read_run(), mixed_precision=mixed_precision)
            share(world, run.mixed_precision, dynamo_plugin or TorchDynamoPlugin())
        elif mixed_precision not in (None, self.mixed_precision):
            argument = f"mixed_precision={mixed_precision!r}"
            raise _cannot_change(argument, repr(self.mixed_precision), "AcceleratorState")

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded with `torch.distributed.fsdp.fully_shard`."""
        return self.fsdp_plugin is not None

    @property
    def distributed_type(self) -> DistributedType:
        """The type of distributed setup."""
        return DistributedType.FSDP if self.is_fsdp2 else super().distributed_type

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Reset the shared state, for tests."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


def is_initialized() -> bool:
    """Return whether an Accelerator or AcceleratorState has been created."""
    return bool(AcceleratorState._shared_state)


def shared_world() -> World | None:
    """Return PartialState's world; None if it is not initialized."""
    return PartialState._shared_state.get("world")


def shared_precision() -> str | Precision | None:
    """Return the precision of the newest Accelerator; None if no Accelerator exists yet.

    A custom Precision is copied, because it must be set up again.
    """
    shared = AcceleratorState._shared_state
    return copy(shared.get("own_precision")) or shared.get("mixed_precision")


def share(
    world: World,
    precision: str | Precision,
    dynamo_plugin: TorchDynamoPlugin,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
) -> AcceleratorState:
    """Set the state that all instances share; return an instance that never changes."""
    PartialState._shared_state["world"] = world
    shared = AcceleratorState._shared_state
    name = precision if isinstance(precision, str) else precision.name
    shared.update(
        world=world,
        mixed_precision=name,
        own_precision=None if name in CLASSES else precision,
        dynamo_plugin=dynamo_plugin,
        fsdp_plugin=fsdp_plugin,
    )
    return copy(AcceleratorState())


def share_accumulation(accumulation: Accumulation) -> GradientState:
    """Set the accumulation that all instances share; return an instance that never changes."""
    GradientState._shared_state["accumulation"] = accumulation
    return copy(GradientState())


class GradientState:
    """The gradient accumulation state of the newest Accelerator.

    Args:
        gradient_accumulation_plugin: settings that replace the current settings.

    Examples:
        >>> from headway.state import GradientState
        >>> from headway.utils import GradientAccumulationPlugin
        >>> GradientState(GradientAccumulationPlugin(num_steps=2)).num_steps
        2
    """

    is_xla_gradients_synced = False  # read by scripts written for Accelerate

    _shared_state: ClassVar[dict[str, Any]] = {}
    accumulation: Accumulation

    def __init__(
        self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    ) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.accumulation = Accumulation(1)
        if gradient_accumulation_plugin is not None:
            self.accumulation.configure(gradient_accumulation_plugin)

    @staticmethod
    def _reset_state() -> None:
        """Reset the shared state, for tests."""
        GradientState._shared_state.clear()
        current_loop().ended_loop = None

    @property
    def initialized(self) -> bool:
        """Whether the shared state has been set."""
        return bool(self._shared_state)

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch synchronizes gradients and steps the optimizers."""
        return self.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, is_due: bool) -> None:
        self.accumulation.sync_gradients = is_due

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set `sync_gradients`; called by scripts written for Accelerate."""
        self.sync_gradients = sync_gradients

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The fields of the GradientAccumulationPlugin that differ from their defaults."""
        return {**self.accumulation.plugin.to_kwargs(), "num_steps": self.num_steps}

    @property
    def num_steps(self) -> int:
        """The number of micro-batches per optimizer step."""
        return self.accumulation.steps

    @property
    def adjust_scheduler(self) -> bool:
        """See `GradientAccumulationPlugin`."""
        return self.accumulation.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """See `GradientAccumulationPlugin`."""
        return self.accumulation.plugin.sync_with_dataloader

    @property
    def in_dataloader(self) -> bool:
        """Whether the script is in a loop over a prepared loader."""
        return bool(open_loops())

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader of the innermost loop; None outside of loops."""
        return current_loop().loader

    @property
    def dataloader_references(self) -> list[Any]:
        """None, followed by the prepared loaders of all loops, outermost first."""
        return [None, *(loop.loader for loop in open_loops())]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is its loader's last batch."""
        return current_loop().is_last

    @property
    def remainder(self) -> int:
        """The number of samples in the active loader's last global batch.

        The value is 0 if that batch is full, and -1 if the number is unknown or no loop is active.
        """
        return getattr(self.active_dataloader, "remainder", -1)


def _cannot_change(argument: str, now: str, state: str) -> UsageError:
    return UsageError(
        f"{state}({argument}) contradicts the state of this process: {now}",
        where=f"the script's {state}(...)",
        fix=f"pass {argument} to the first {state} or Accelerator of the script",
        code=Code.CONTRADICTS_RUN,
    )
