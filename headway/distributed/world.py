"""Device and device mesh of this process; setup and teardown of the process group."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.devices.kind import DeviceKind
from headway.devices.table import CPU, KINDS, extension_kinds, kind_of
from headway.distributed.handler import KwargsHandler
from headway.errors import MORE_PROCESSES, Code, LaunchError, MachineError, UsageError
from headway.ipc.numbering import ALONE, ALONE_VARIABLE, unknown_launcher
from headway.ipc.process_groups import prefix_group_stores
from headway.ipc.progress import process_progress
from headway.ipc.run_contract import Ranks, main_place, read_ranks, record_collectives, values_of
from headway.ipc.stderr import log_once, waiting_for
from headway.machine.detection import detect_machine


class DistributedType(str, Enum):
    """The type of distributed setup; each member is equal to its name, as in Accelerate.

    Examples:
        >>> from headway import DistributedType, PartialState
        >>> PartialState(cpu=True).distributed_type is DistributedType.NO  # with one rank
        True
        >>> DistributedType.NO == "NO"
        True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    FSDP = "FSDP"
    # never set; for comparisons in scripts written for Accelerate
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"
    XLA = "XLA"
    MULTI_HPU = "MULTI_HPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_NPU = "MULTI_NPU"
    MULTI_SDAA = "MULTI_SDAA"


@dataclass(frozen=True)
class World:
    """The rank of this process, and the device of its model and batches."""

    device: torch.device
    ranks: Ranks

    @property
    def is_main(self) -> bool:
        return self.ranks.rank == 0

    def mesh(self, **sizes: int) -> DeviceMesh:
        """Return a mesh of all ranks with these dimensions, in which the last varies fastest.

        With several dimensions, this creates process groups, so every rank must call it.
        """
        return _mesh_of(self.device.type, dist.group.WORLD, **sizes)

    @property
    def distributed_type(self) -> DistributedType:
        """Accelerate's name for the distributed setup."""
        if self.ranks.world_size == 1:
            return DistributedType.NO
        return DistributedType(kind_of(self.device.type).distributed_type)


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments for `torch.distributed.init_process_group`; they have no effect with one rank.

    Args:
        backend: a torch.distributed backend. With the default, "nccl", the device determines the
            backend: NCCL on GPUs, gloo on CPUs.
        init_method: the URL of the rendezvous; None uses the launcher's environment variables.
        timeout: the timeout of collectives, which is also set for an existing process group. None
            uses torch's default: 10 minutes with NCCL, 30 minutes with gloo.

    Examples:
        >>> from datetime import timedelta
        >>> from headway import InitProcessGroupKwargs
        >>> InitProcessGroupKwargs(timeout=timedelta(hours=1)).to_kwargs()
        {'timeout': datetime.timedelta(seconds=3600)}
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    @property
    def named_backend(self) -> str | None:
        """The backend set by the script; None for the default, which depends on the device."""
        return None if self.backend == InitProcessGroupKwargs.backend else self.backend


@lru_cache(maxsize=2)
def _mesh_of(device: str, _: object, **sizes: int) -> DeviceMesh:
    return init_device_mesh(device, (*sizes.values(),), mesh_dim_names=(*sizes,))


def join_world(device: str | torch.device, settings: InitProcessGroupKwargs) -> World:
    """Choose this rank's device, and initialize the process group if there are several ranks.

    `device` is a name in `KINDS`, `gpu` for this machine's kind of GPU, `auto` for the best device
    that is available to every rank, or the device that this process already uses. An existing group
    must have the environment's size and the backend of `settings`; only its timeout is changed.
    """
    ranks = read_ranks() or Ranks()
    if ranks.world_size == 1 and dist.is_initialized():  # the script created a group without RANK
        rank, size = dist.get_rank(), dist.get_world_size()
        ranks = Ranks(rank, rank, size, size)
    elif ranks.world_size == 1:
        _require_single_process(is_rank=read_ranks() is not None)
    world = World(_device_of(ranks, device) if isinstance(device, str) else device, ranks)
    kind_of(world.device.type).make_current(world.device)
    if ranks.world_size > 1:
        if not dist.is_initialized():
            _form_group(world, settings)
        else:
            _apply_to_group(settings, world)
        _require_matching_group(ranks)
    return world


def _require_single_process(*, is_rank: bool) -> None:
    """Raise UsageError if this process would train alone although its launcher started several."""
    row = unknown_launcher()
    if row is None:
        return
    problem = f"{row.source} has started several processes, but this {row.unit} trains alone"
    where = f"environment {', '.join(dict.fromkeys((row.size, row.rank)))}"
    fix = f"`export {ALONE_VARIABLE}={ALONE}` if this is intended, as with srun -n8 wandb agent"
    if is_rank:  # RANK and WORLD_SIZE are 0 and 1, as with torchrun in each process
        log_once(f"note: {problem} ({where}); fix: {fix}")
        return
    fix = f"start the script with `headway launch`, which sets RANK, WORLD_SIZE and so on; or {fix}"
    raise UsageError(f"{problem}: RANK is not set", where=where, fix=fix, code=Code.RANK_VARIABLES)


before_leaving: dict[Callable[[], None], None] = {}
"""Functions to call before the process group is destroyed; each waits for users of the group."""


def leave_world() -> None:
    """Destroy the process group, if there is one."""
    for wait in [*before_leaving]:
        wait()
    if dist.is_initialized():
        _left.append(dist.group.WORLD)
        dist.destroy_process_group()


def default_store() -> Any:
    """Return the group's `PrefixStore` (torch 2.8 to 2.13), which has no public name in torch."""
    return dist.distributed_c10d._get_default_store()


_GIL_WAIT_S = 0.02  # for waiting threads to take the GIL
_left: list[object] = []
"""Destroyed groups, which are kept alive until the process exits. If a DDP model held the last
reference to a group, torch would join gloo's threads without releasing the GIL, and would deadlock
if a thread is waiting for the GIL."""


def _leave_world_unless_failed() -> None:
    """Wait for gloo's threads: a thread that takes the GIL while Python exits aborts the process.

    See pytorch#190489. After an unhandled exception, this is skipped, because the other ranks are
    still working.
    """
    if getattr(sys, "last_type", None) is None:
        leave_world()
        _left.clear()
        time.sleep(_GIL_WAIT_S)


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks in the group; (0, 1) without a group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def rank_and_size_without_group() -> tuple[int, int]:
    """Return the rank and size in the process group or, without a group, the launcher's values."""
    if dist.is_initialized():
        return rank_and_size()
    ranks = read_ranks() or Ranks()
    return ranks.rank, ranks.world_size


def require_group(call: str) -> None:
    """Raise UsageError for a collective call without a process group."""
    size = rank_and_size_without_group()[1]
    if size != rank_and_size()[1]:
        raise UsageError(
            f"{call} must be called by all {size} ranks, but there is no process group",
            where=f"the script's {call}",
            fix="call it after Accelerator() and before end_training()",
            code=Code.NO_GROUP,
        )


_LOCAL_RANK = "if the ranks are on several machines, set it to the number on this machine"


def _device_of(ranks: Ranks, asked: str) -> torch.device:
    name = best_device(ranks) if asked in ("auto", "gpu") else asked
    if asked == "auto" and name == CPU.name:
        _refuse_unusable_gpu()
    if asked == "gpu" and name == "cpu":
        raise MachineError(
            f"device is 'gpu', but there is no GPU: {detect_machine().best_device()[1]}",
            where="device 'gpu'",
            fix="choose `--device auto`, or `--cpu`",
            code=Code.NO_GPU,
        )
    kind = kind_of(name)
    kind.load()
    if kind.is_numbered:
        count = kind.count()
        if ranks.local_rank >= count:
            why = detect_machine().unavailable_reason(name) if not count else None
            raise MachineError(
                f"there is no GPU for local rank {ranks.local_rank}: torch detects {count}"
                + (f" ({why})" if why else ""),
                where=f"device {asked!r}, LOCAL_WORLD_SIZE={ranks.local_world_size}",
                fix="start as many processes as there are GPUs, or train with `--cpu`"
                + ("" if values_of(["LOCAL_RANK"]) else f"; LOCAL_RANK is not set: {_LOCAL_RANK}"),
                code=Code.TOO_FEW_GPUS,
            )
        return torch.device(name, ranks.local_rank)  # pragma: needs a GPU
    if not kind.is_available():
        machine = detect_machine()
        why = machine.unavailable_reason(name)
        reason = f"torch finds no usable {kind.maker} GPU{f': {why}' if why else ''}"
        raise MachineError(
            f"device is {name!r}, but {reason}",
            where=f"device {name!r}",
            fix=machine.mps_fix or "choose `--device cpu`, or `pip install -U torch` on a Mac",
            code=Code.NO_MPS,
        )
    return torch.device(name)


def _refuse_unusable_gpu() -> None:
    """Raise MachineError if a GPU with a driver is unusable; log a note if a GPU has no driver."""
    machine = detect_machine()
    if machine.unused_card:
        log_once(f"note: {machine.unused_card}; fix: install the driver")
    name, reason = machine.best_device()
    if kind_of(name).is_numbered:
        from headway.machine.gpus import gpu_fixes

        raise MachineError(
            f"a GPU driver is loaded, but torch cannot use a GPU: {reason}",
            where="device 'auto'",
            fix="; or ".join([*gpu_fixes(machine), "train with Accelerator(cpu=True)"]),
            code=Code.NO_GPU,
        )


def group_device() -> torch.device:
    backends = _backends()
    for name, backend in backends.items():
        kind = kind_of(name)
        is_own = backend == kind.backend or "cpu" not in backends
        if kind.is_numbered and is_own:  # pragma: needs a GPU
            return kind.current()
    return torch.device("cpu")


def best_device(ranks: Ranks) -> str:
    """Return the best device that is available to every rank."""

    def is_usable(kind: DeviceKind) -> bool:
        if kind.most_ranks is None or not kind.is_available():
            return kind.is_available()
        return ranks.world_size <= kind.most_ranks and not detect_machine().unavailable_reason(
            kind.name
        )

    best = next(name for name, kind in KINDS.items() if is_usable(kind))
    if best != CPU.name:
        return best
    return next((name for name, kind in extension_kinds().items() if is_usable(kind)), best)


def group_backend(device: torch.device) -> str | None:
    """Return the process group's backend for `device`; None without a group."""
    return _backends().get(device.type)


def _backends() -> dict[str, str]:
    """Return the group's backends by device type; empty without a group."""
    if not dist.is_initialized():
        return {}
    return dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))


SILENT_GROUP_S = 10.0
"""Seconds after which ranks without a launcher log that they wait for peers."""


def _form_group(world: World, settings: InitProcessGroupKwargs) -> None:
    # DDP would import this module later, and the module would keep a reference to the group
    import_module("torch.distributed.nn.functional")
    prefix_group_stores(import_module("torch.distributed.distributed_c10d"))
    record_collectives()
    device, own = world.device.type, kind_of(world.device.type).backend
    usual = "gloo" if own == "gloo" else f"cpu:gloo,{device}:{own}"
    backend = settings.named_backend or usual
    place = settings.init_method or main_place()
    peers = f"the other rank{'s' * (world.ranks.world_size > 2)} at {place}"
    is_quiet = process_progress().is_connected  # the launcher reports ranks that do not join
    try:
        with waiting_for(peers, is_quiet=is_quiet, after_s=SILENT_GROUP_S):
            dist.init_process_group(
                backend,
                init_method=settings.init_method,
                timeout=settings.timeout,
                rank=world.ranks.rank,
                world_size=world.ranks.world_size,
            )
        if world.device.type == "cpu":
            atexit.register(_leave_world_unless_failed)
    except UsageError:
        raise
    except (RuntimeError, ValueError) as error:
        limited = any(text in str(error) for text in ("new thread", "Resource temporarily"))
        start = "check the other ranks' output, and open the ports above 1023 between the machines"
        if not is_quiet:
            start = "start the script with `headway launch` or torchrun, on every machine"
        is_local = is_quiet and world.ranks.local_world_size == world.ranks.world_size
        given = " and ".join(values_of(kind_of(device).interfaces))
        if given and (not is_local or "Unable to find address for" in str(error)):  # of gloo
            start = f"set {given} to the interface that connects the ranks, or unset it; {start}"
        if "EADDRINUSE" in str(error):
            start = "set another MASTER_PORT, the same for all ranks, or stop the job that uses it"
        raise LaunchError(
            f"the {world.ranks.world_size} ranks could not form a process group: {error}",
            where=f"rank {world.ranks.rank}, torch.distributed.init_process_group({backend!r})",
            fix=MORE_PROCESSES if limited else start,
            code=Code.NO_CONNECTION,
        ) from error


def _apply_to_group(settings: InitProcessGroupKwargs, world: World) -> None:
    """Set the existing group's timeout; raise UsageError for settings that cannot be changed."""
    backend, contradicts = group_backend(world.device), ""
    if settings.named_backend not in (None, backend, str(dist.get_backend_config())):
        contradicts = f"backend is {settings.backend!r}, but the process group has {backend!r}"
    elif settings.init_method is not None:
        contradicts = f"init_method is {settings.init_method!r}, but a process group already exists"
    if contradicts:
        raise UsageError(
            contradicts,
            where="the script's InitProcessGroupKwargs(...)",
            fix="create the Accelerator with this handler before any PartialState() or other"
            " Accelerator",
            code=Code.CONTRADICTS_RUN,
        )
    if settings.timeout is not None:
        # a private function of torch
        import_module("torch.distributed.distributed_c10d")._set_pg_timeout(settings.timeout)


def group_timeout() -> timedelta:
    """Return the timeout of the existing group's collectives, from private attributes in torch."""
    group: Any = dist.group.WORLD
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def _require_matching_group(ranks: Ranks) -> None:
    rank, size = rank_and_size()
    if (rank, size) != (ranks.rank, ranks.world_size):
        raise UsageError(
            f"this process is rank {ranks.rank} of {ranks.world_size},"
            f" but rank {rank} of {size} in its process group",
            where="RANK and WORLD_SIZE, and the existing torch.distributed process group",
            fix="remove the script's own init_process_group(...) before Accelerator()",
            code=Code.RANK_VARIABLES,
        )
