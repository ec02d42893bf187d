"""What one attempt at a script is asked for, and what it found."""

from __future__ import annotations

from typing import NamedTuple

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")
"""What a byte is for. Activations are made in the passes of modules; other tensors, such as
batches, outside of them."""

FAKE, REAL, STATES = "fake tensors", "real steps", "states alone"
"""How far a script was followed, best first: all its steps without memory; real steps on this CPU;
no step, but what parameters, gradients and optimizer take."""


class Attempt(NamedTuple):
    """One run of the script in a process of its own."""

    program: str  # the script's path, or the name of a module
    args: tuple[str, ...]
    is_module: bool = False
    rung: str = FAKE  # or REAL
    device: str = "cpu"  # or cuda: what the script is told that it has
    device_name: str = ""
    device_bytes: int = 0
    world_size: int = 1
    local_world_size: int = 1
    sharded: bool = False  # by `fully_shard`, over the ranks
    checkpointed: bool = False  # activations of repeated blocks are recomputed
    time_limit_s: float = 300.0
    memory_limit_bytes: int | None = None  # for REAL: what tensors may take here


class Outcome(NamedTuple):
    """What an attempt found, for one rank."""

    rung: str = ""  # FAKE, REAL or STATES; empty where nothing could be said
    peak_bytes: int = 0  # at the highest point of the steps; for STATES the sum of the states
    peak_at: str = ""  # when that was, and at which line
    categories: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    steps: int = 0  # optimizer steps that the script made
    seconds: float = 0.0  # from its first line to its last
    notes: tuple[str, ...] = ()  # what was skipped, bounded or refused, each with its line
    failed_at: str = ""  # the line that did not work, and why; empty where all did
    output: str = ""  # the last lines that the script printed
    is_late: bool = False  # the time limit stopped it
