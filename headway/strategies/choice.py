"""Which strategy a run uses."""

from __future__ import annotations

from headway.strategies.ddp import DDP
from headway.strategies.strategy import Strategy, StrategySettings
from headway.world import World

STRATEGIES = {"ddp": DDP}


def strategy_for(world: World, settings: StrategySettings) -> Strategy:
    """Return the strategy for a world of one rank, or of several."""
    if world.ranks.world_size == 1:
        return Strategy(world, settings)
    name = "ddp" if settings.strategy == "auto" else settings.strategy
    return STRATEGIES[name](world, settings)
