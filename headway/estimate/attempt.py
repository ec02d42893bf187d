"""What one attempt at a script is asked for, and what it found."""

from __future__ import annotations

from typing import NamedTuple

from headway.contract.lines import decode, kinds_of

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""What a byte is for. Activations are all that is none of the others, such as batches."""

OFFLOADED = ("parameters", "gradients", "optimizer")
"""What FSDP keeps in the memory of the CPU; what it gathers of it for a while is an activation."""

FAKE, REAL, STATES = "fake tensors", "real steps", "states alone"
_SHOWN = 200  # characters of what is no outcome

RUNGS = (FAKE, REAL, STATES)
"""How far a script was followed, best first: all its steps without memory; real steps on this CPU;
no step, but what parameters, gradients and optimizer take."""


def scratch_prefix(server: int) -> str:
    """Return how the names of the scratch folders begin that a server of this process id makes."""
    return f"headway-estimate-{server}-"


class Attempt(NamedTuple):
    """One run of the script in a process of its own.

    Args:
        program: the script's path, or the name of a module.
        args: its own arguments.
        is_module: run `program` as `python -m` does.
        rung: FAKE or REAL.
        device: `cuda` or `cpu`: what the script is told that it has.
        device_name: of a GPU, as `torch.cuda.get_device_name()` gives it.
        device_bytes: the memory of one device.
        world_size: ranks in all.
        local_world_size: ranks on each machine.
        sharded: `fully_shard` the model over the ranks.
        checkpointed: recompute the activations of its repeated blocks.
        offloaded: parameters, gradients and optimizer states lie in the memory of the CPU.
        wrap: what the units are; see `headway.strategies.units`.
        steps: optimizer steps, after which the script is stopped.
        time_limit_s: seconds.
        memory_limit_bytes: for REAL: what tensors may take here.
    """

    program: str
    args: tuple[str, ...]
    is_module: bool = False
    rung: str = FAKE
    device: str = "cpu"
    device_name: str = ""
    device_bytes: int = 0
    world_size: int = 1
    local_world_size: int = 1
    sharded: bool = False
    checkpointed: bool = False
    offloaded: bool = False
    wrap: str = "auto"
    steps: int = 2
    time_limit_s: float = 300.0
    memory_limit_bytes: int | None = None


class Part(NamedTuple):
    """The bytes of one module at the peak, by category; several of one kind are one part."""

    module: str
    bytes: dict[str, int]


class Outcome(NamedTuple):
    """What an attempt found, for one rank.

    Attributes:
        rung: a name in RUNGS; empty where nothing could be said.
        peak_bytes: at the highest point of the steps; for STATES the sum of the states.
        categories: the bytes of the peak by CATEGORIES.
        modules: those that take most at the peak, largest first.
        units: the modules that are sharded or recomputed, by their names.
        steps: optimizer steps that the script made.
        seconds: from its first line to its last.
        notes: what was skipped, bounded or refused, each with its line.
        failed_at: the line of the script that did not work, and why; empty where all did.
        output: the last lines that the script printed.
        is_late: the time limit stopped it.
    """

    rung: str = ""
    peak_bytes: int = 0
    categories: dict[str, int] = {}  # noqa: RUF012  never changed
    modules: tuple[Part, ...] = ()
    units: tuple[str, ...] = ()
    steps: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    failed_at: str = ""
    output: str = ""
    is_late: bool = False


def decode_outcome(line: str) -> Outcome:
    """Return the outcome in a line.

    Raises:
        ValueError: it has none, for the script of an attempt can have written it.
    """
    try:
        outcome: Outcome = decode(kinds_of(Outcome), line)
    except ValueError as error:
        raise ValueError(f"no outcome: {line[:_SHOWN]}") from error
    maps = (outcome.categories, *(part.bytes for part in outcome.modules))
    if (
        outcome == Outcome()  # which a script may have left in its place
        or outcome.rung not in ("", *RUNGS)
        or min(outcome.peak_bytes, outcome.steps) < 0
        or not all(found.keys() <= {*CATEGORIES} for found in maps)
        or (outcome.rung and outcome.categories.keys() != {*CATEGORIES})
    ):
        raise ValueError(f"no outcome: {line[:_SHOWN]}")
    return outcome
