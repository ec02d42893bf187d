"""Other ways to train a script's model: sharded over the ranks, or with activations recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.contract.strategies import DDP, SHARDED
from headway.distributed.world import World
from headway.estimate.child.replacing import replace_wherever_imported
from headway.strategies import choice
from headway.strategies.rebinding import sharded_as
from headway.strategies.strategy import Strategy, StrategySettings


def mesh_of_all() -> DeviceMesh:
    """Return the mesh of all ranks; to be called before there are fake tensors."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def replace_choice_of_strategy(note: Callable[[str], None]) -> None:
    """Leave how ranks share a model to the attempt, whatever a script tells its Accelerator."""
    choose = choice.strategy_for

    def strategy_for(world: World, settings: StrategySettings) -> Strategy:
        if settings.strategy in SHARDED or settings.activation_checkpointing:
            note("how the script's Accelerator shares a model is left to the strategies compared")
        plain = settings._replace(strategy=DDP, activation_checkpointing=False, cpu_offload=False)
        return choose(world, plain)

    replace_wherever_imported("strategy_for", strategy_for)


def shard(
    model: torch.nn.Module,
    units: Iterable[Sequence[torch.nn.Module]],
    optimizers: Iterable[torch.optim.Optimizer],
    mesh: DeviceMesh,
) -> None:
    """Shard a model over the ranks with torch's `fully_shard`, unit by unit.

    Its optimizers update the shards, with their states so far; the whole parameters are freed
    unless the script keeps them.
    """
    from torch.distributed.fsdp import fully_shard

    whole = dict(model.named_parameters(remove_duplicate=False))
    _shard_where_parameters_are(next(iter(whole.values())).device)
    for unit in units:
        fully_shard(unit[0] if len(unit) == 1 else list(unit), mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    shards = dict(model.named_parameters(remove_duplicate=False))
    replaced = {id(whole[name]): shards[name] for name in whole}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(one), one) for one in group["params"]]
        for old in [one for one in optimizer.state if id(one) in replaced]:
            new, state = replaced[id(old)], optimizer.state.pop(old)
            optimizer.state[new] = {name: sharded_as(new, one) for name, one in state.items()}


def _shard_where_parameters_are(device: torch.device) -> None:
    """Let FSDP take `device`, which it would work out of the mesh: a CPU has an index only here.

    Relies on `_get_device_from_mesh`, which FSDP's modules import by this name.
    """

    def from_mesh(_: Any) -> torch.device:
        return device

    replace_wherever_imported("_get_device_from_mesh", from_mesh)
