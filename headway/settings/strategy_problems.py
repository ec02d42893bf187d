"""Checks of how ranks share a model: the strategy, and what belongs to it."""

from __future__ import annotations

from headway.contract.origin import Layer
from headway.contract.strategies import FSDP, HSDP
from headway.devices.table import kind_of
from headway.errors import Code, Problem
from headway.machine.facts import Machine
from headway.settings.remedies import change
from headway.settings.table import NO, YES, Settings


def strategy_problems(settings: Settings, machine: Machine | None) -> list[Problem]:
    """Return the problems of the settings about sharding; see `problems`."""
    found = _of_offload(settings, machine)
    is_detected = settings.origin("num_processes").layer is Layer.DETECTED
    world_size = settings.num_processes * settings.num_machines
    if settings.strategy == HSDP and world_size > 1 and (machine is not None or not is_detected):
        found += _of_shard_size(settings, world_size)
    return found


def _of_shard_size(settings: Settings, world_size: int) -> list[Problem]:
    size = settings.shard_size
    sizes = [one for one in range(2, world_size + 1) if world_size % one == 0]
    if size is None:
        if settings.num_machines > 1 and settings.num_processes > 1:
            return []
        each = "one machine" if settings.num_machines == 1 else "one process on each machine"
        return settings.problem(
            Code.NO_SHARD_SIZE,
            f"strategy is 'hsdp' on {each}, and shard_size is not set",
            [(change("strategy", FSDP),), (change("shard_size", sizes[0]),)],
            "strategy",
            "shard_size",
        )
    if world_size % size == 0:
        return []
    fitting = max((one for one in sizes if one <= size), default=sizes[0])
    return settings.problem(
        Code.SHARD_SIZE,
        f"shard_size is {size}, which does not divide the {world_size} ranks",
        [(change("shard_size", fitting),), (change("strategy", FSDP),)],
        "shard_size",
        "strategy",
        "num_processes",
    )


def _of_offload(settings: Settings, machine: Machine | None) -> list[Problem]:
    is_detected = settings.origin("device").layer is Layer.DETECTED
    if settings.cpu_offload != YES or kind_of(settings.device).is_numbered:
        return []
    if machine is None and is_detected:  # another machine may have a GPU
        return []
    found = settings.problem(
        Code.OFFLOAD_WITHOUT_GPU,
        f"cpu_offload moves parameters from a GPU to the CPU, but device is {settings.device!r}",
        [(change("cpu_offload", NO),)],
        "cpu_offload",
        "device",
    )
    return [problem._replace(is_of_machine=is_detected) for problem in found]
