"""Which strategy a run uses."""

from __future__ import annotations

from headway.distributed.world import World
from headway.strategies.ddp import DDP
from headway.strategies.strategy import Strategy, StrategySettings


def strategy_for(world: World, settings: StrategySettings) -> Strategy:
    """Return the strategy for a world of one rank, or of several."""
    if world.ranks.world_size == 1:
        return Strategy(world, settings)
    if settings.strategy in ("auto", "ddp"):
        return DDP(world, settings)
    from headway.strategies.fsdp import FSDP, HSDP  # its part of torch takes time to import

    return {"fsdp": FSDP, "hsdp": HSDP}[settings.strategy](world, settings)
