"""What one attempt at a script is asked for, and what it found."""

from __future__ import annotations

from typing import NamedTuple

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")
"""What a byte is for. Activations are made in the passes of modules; other tensors, such as
batches, outside of them."""


class Attempt(NamedTuple):
    """One run of the script in a process of its own."""

    program: str  # the script's path, or the name of a module
    args: tuple[str, ...]
    is_module: bool = False
    device: str = "cpu"  # or cuda: what the script is told that it has
    device_name: str = ""
    device_bytes: int = 0
    world_size: int = 1
    local_world_size: int = 1
    sharded: bool = False  # by `fully_shard`, over the ranks
    checkpointed: bool = False  # activations of repeated blocks are recomputed
    time_limit_s: float = 300.0


class Outcome(NamedTuple):
    """What an attempt found, for one rank."""

    peak_bytes: int = 0  # at the highest point of the steps
    peak_at: str = ""  # when that was, and at which line
    categories: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    steps: int = 0  # optimizer steps that the script made
    seconds: float = 0.0  # from its first line to its last
    notes: tuple[str, ...] = ()  # what was skipped, bounded or refused, each with its line
    failed_at: str = ""  # the line that did not work, and why; nothing else is known then
    output: str = ""  # the last lines that the script printed
