"""The ranks of a run that has one process: they exchange nothing, and share a model as asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from headway.contract.strategies import DDP, SHARDED
from headway.distributed.world import World
from headway.estimate.child.patching import nothing, replace, replace_wherever_imported
from headway.strategies.fsdp import sharded_as
from headway.strategies.strategy import Strategy, StrategySettings
from headway.training import connector

_FIRST_RANK = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def join(world_size: int, local_world_size: int) -> None:
    """Make this process rank 0 of `world_size`; for one rank, only if the script starts a group.

    The backend `fake` is part of torch's own tests; its store has no public name.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start = dist.init_process_group

    def init_process_group(*_: Any, **__: Any) -> None:
        if not dist.is_initialized():
            start("fake", store=FakeStore(), rank=0, world_size=world_size)

    if world_size > 1:
        sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local_world_size)}
        os.environ.update(_FIRST_RANK | sizes)
        init_process_group()
    replace(dist, "init_process_group", init_process_group)


def replace_object_collectives(world_size: int) -> None:
    """Make collectives of objects return this rank's; nothing is pickled."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(
        obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any
    ) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * world_size

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        if scatter_object_input_list is not None:
            scatter_object_output_list[0] = scatter_object_input_list[0]

    for stand_in in (all_gather_object, gather_object, scatter_object_list):
        replace(dist, stand_in.__name__, stand_in)
    replace(dist, "broadcast_object_list", nothing)


def replace_data_parallel(classify: Callable[[torch.Tensor, str], None] | None) -> None:
    """Make DistributedDataParallel allocate its memory, and exchange nothing.

    Its reducer, in C++, cannot work on fake tensors. It keeps a copy of all gradients in buckets,
    unless gradients are views of them. `classify` is the ledger's; None under another strategy.
    """

    def init(self: Any, module: torch.nn.Module, *_: Any, **options: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module = module
        self.device_ids = self.output_device = None
        self.require_backward_grad_sync = True
        self._buckets = []
        if classify is not None and not options.get("gradient_as_bucket_view", False):
            trained = [one for one in module.parameters() if one.requires_grad]
            self._buckets = [torch.empty_like(one, requires_grad=False) for one in trained]
            for bucket in self._buckets:
                classify(bucket, "gradients")

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        yield

    for name, stand_in in {
        "__init__": init,
        "forward": forward,
        "no_sync": no_sync,
        "register_comm_hook": nothing,
        "_set_static_graph": nothing,
    }.items():
        replace(DistributedDataParallel, name, stand_in)


def replace_choice_of_strategy(note: Callable[[str], None]) -> None:
    """Make the attempt choose the strategy, whatever a script passes to its Accelerator."""
    choose = connector.strategy_for

    def strategy_for(world: World, chosen: str | Strategy, settings: StrategySettings) -> Strategy:
        if chosen in SHARDED or settings.activation_checkpointing:
            note("how the script's Accelerator shares a model is left to the strategies compared")
        plain = settings._replace(activation_checkpointing=False, cpu_offload=False)
        return choose(world, DDP, plain)

    replace_wherever_imported("strategy_for", strategy_for)


def shard(
    model: torch.nn.Module,
    units: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    mesh: DeviceMesh,
) -> None:
    """Shard a model over the ranks with torch's `fully_shard`, unit by unit.

    Its optimizers update the shards, with their states so far. FSDP would take the device from the
    mesh: a CPU has an index only here. Relies on `_get_device_from_mesh`, which FSDP's modules
    import by this name.
    """
    from torch.distributed.fsdp import fully_shard

    whole = dict(model.named_parameters(remove_duplicate=False))
    device = next(iter(whole.values())).device
    replace_wherever_imported("_get_device_from_mesh", lambda _: device)
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    shards = dict(model.named_parameters(remove_duplicate=False))
    replaced = {id(whole[name]): shards[name] for name in whole}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(one), one) for one in group["params"]]
        for old in [one for one in optimizer.state if id(one) in replaced]:
            new, state = replaced[id(old)], optimizer.state.pop(old)
            optimizer.state[new] = {name: sharded_as(new, one) for name, one in state.items()}
