"""`headway launch --fit-memory`: the cheapest way to train a script that fits into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headway.commands.estimate import (
    COUNTED,
    attempt_at,
    require_use_of_gpu,
    variables_for,
)
from headway.contract.memory_use import size
from headway.contract.origin import Layer, Origin
from headway.contract.strategies import AUTO, HSDP
from headway.errors import ConfigError, UsageError
from headway.estimate.devices import ESTIMATED, Devices, devices_of
from headway.estimate.planner import Judged, Planner, Row, rows_for
from headway.estimate.report import failure
from headway.launcher.planning.program import Program
from headway.launcher.reporting.waiting import waiting_for
from headway.machine.facts import Machine
from headway.settings.profile import Entries, Entry
from headway.settings.table import Settings

_FLAG = "--fit-memory"


class Fitted(NamedTuple):
    """The cheapest strategy that fits.

    Attributes:
        entries: its settings, as a layer.
        estimated_bytes: the peak of tensors on each rank, without a margin.
        note: a line about it.
    """

    entries: Entries
    estimated_bytes: int
    note: str


def fit_memory(
    settings: Settings,
    machine: Machine,
    program: Program,
    *,
    python: Sequence[str],
    environ: Mapping[str, str],
) -> Fitted:
    """Return the cheapest strategy that fits; what the user has set of its settings is kept.

    Raises:
        ConfigError: the program, its device or its strategy is one that cannot be estimated.
        UsageError: the script could not be followed, or no strategy is known to fit.
    """
    devices = _devices(settings, machine, program)
    rows = [row for row in rows_for(devices.world_size, devices.kind) if _agrees(row, settings)]
    attempt = attempt_at(program, devices)._replace(wrap=settings.wrap)
    said = [name for name in COUNTED if settings.origin(name).layer is not Layer.DEFAULT]
    variables = variables_for({name: settings.values[name].value for name in said})
    found: list[Judged] = []
    with (
        waiting_for("the script's first two optimizer steps, without memory"),
        Planner(python, {**environ, **variables}) as planner,
    ):
        for row in rows:
            found.append(planner.judge(row, attempt, devices, None))
            require_use_of_gpu([found[-1].outcome], devices, program)
            if found[-1].fits:
                break
    chosen = found[-1] if found else None
    if chosen is None or not chosen.fits:
        raise _nothing_fits(found, devices, program)
    origin = Origin(Layer.FLAG, flag=_FLAG)
    given = {
        name: Entry(value, origin)
        for name, value in chosen.row.settings.items()
        if not _is_set(settings, name)
    }
    note = (
        f"{_FLAG}: {chosen.row.name} takes {size(chosen.needed_bytes)} of "
        f"{size(devices.bytes_per_rank)} on each rank, with a margin"
    )
    return Fitted(given, chosen.outcome.peak_bytes, note)


def _devices(settings: Settings, machine: Machine, program: Program) -> Devices:
    obstacle = ""
    if program.kind == "program":
        obstacle = f"{program.name} is not a Python script"
    elif settings.strategy == HSDP:
        obstacle = f"strategy is {HSDP!r}"
    elif settings.device not in ESTIMATED:
        obstacle = f"device is {settings.device!r}"
    if obstacle:
        raise ConfigError(
            f"{obstacle}, whose memory is not estimated",
            where=f"flag {_FLAG}",
            fix=f"leave {_FLAG} out",
        )
    gpus = machine.gpus_of(settings.device)
    found = devices_of(machine, [gpus[index] for index in settings.devices.select(gpus).indices])
    return found._replace(per_machine=settings.num_processes, machines=settings.num_machines)


def _is_set(settings: Settings, name: str) -> bool:
    return settings.origin(name).is_user_set and settings.values[name].value != AUTO


def _agrees(row: Row, settings: Settings) -> bool:
    """Return whether a row leaves what the user has set as it is."""
    return all(
        row.settings.get(name, "no") == settings.values[name].value
        for name in ("strategy", "activation_checkpointing", "cpu_offload")
        if _is_set(settings, name)
    )


def _nothing_fits(found: Sequence[Judged], devices: Devices, program: Program) -> UsageError:
    followed = [one for one in found if one.fits is not None]
    if followed:
        needed = ", ".join(f"{one.row.name} {size(one.needed_bytes)}" for one in followed)
        return UsageError(
            f"no strategy fits {size(devices.bytes_per_rank)} on each rank: {needed}",
            where=f"flag {_FLAG}",
            fix="take smaller batches, or more devices",
        )
    failed_at = next((one.outcome.failed_at for one in found), "the settings leave no strategy")
    said = failure(one.outcome for one in found)
    return UsageError(
        f"the memory of the script could not be estimated: {failed_at}",
        where=f"{program.name}; its last lines:\n{said}" if said else program.name,
        fix=f"leave {_FLAG} out, or see what `headway estimate` says",
    )
