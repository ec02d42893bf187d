"""Which strategy a run uses."""

from __future__ import annotations

from headway.distributed.world import World
from headway.strategies.ddp import DDP
from headway.strategies.strategy import Strategy, StrategySettings


def strategy_for(world: World, chosen: str | Strategy, settings: StrategySettings) -> Strategy:
    """Return the strategy of a name, or the script's own; a name has no effect with one rank."""
    strategy = _named(chosen, world) if isinstance(chosen, str) else chosen
    strategy.set_up(world, settings)
    return strategy


def _named(name: str, world: World) -> Strategy:
    if world.ranks.world_size == 1:
        return Strategy()
    if name in ("auto", "ddp"):
        return DDP()
    from headway.strategies.fsdp import FSDP, HSDP  # its part of torch takes time to import

    return {"fsdp": FSDP, "hsdp": HSDP}[name]()
