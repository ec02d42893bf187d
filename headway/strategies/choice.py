"""Which strategy a run uses."""

from __future__ import annotations

from typing import NamedTuple

from headway.strategies.ddp import DDP
from headway.strategies.strategy import Strategy
from headway.world import World

STRATEGIES = {"ddp": DDP}


class StrategySettings(NamedTuple):
    """What is set about how ranks share models."""

    strategy: str = "auto"  # or a name in STRATEGIES; auto is ddp


def strategy_for(world: World, settings: StrategySettings) -> Strategy:
    """Return the strategy for a world of one rank, or of several."""
    if world.ranks.world_size == 1:
        return Strategy(world)
    return STRATEGIES["ddp" if settings.strategy == "auto" else settings.strategy](world)
