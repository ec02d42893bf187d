"""What the questions of `headway config` depend on: the machine, the profiles, given answers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from headway.commands.config.answers import QUESTIONS, checked_answers, read_answers
from headway.commands.config.assignments import assignments
from headway.commands.config.check import launch_problems, with_idle_gpus
from headway.commands.flags import Parsed, machine_from_flags
from headway.config_wizard.questions import LAYER_OF, PROJECT, USER, Choice, Facts
from headway.config_wizard.texts import PLACE
from headway.contract.origin import Layer, Origin
from headway.errors import ConfigError, Problem
from headway.machine.facts import Machine
from headway.settings.hosts import read_hostfile
from headway.settings.layers import environment_layer
from headway.settings.profile import Entries, Entry, read_profile
from headway.settings.profile_files import (
    PROJECT_FILE,
    choose_profile,
    find_project_profile,
    is_there,
    shown,
)
from headway.settings.resolve import parse_layers
from headway.settings.setting import Raw

HOSTFILES = ("hostfile", "hosts.txt", "/job/hostfile")  # the last one is DeepSpeed's
_ANSWERED = Origin(Layer.ANSWERS, reason="your answers")


def paths_of(profile: str | None) -> dict[str, str]:
    """Return the paths that the profile can be written to, by place; the likelier one first."""
    user = choose_profile(profile).path
    if profile is not None:
        return {USER: user}
    project = find_project_profile(trusted=user)
    if project is not None:
        return {PROJECT: project, USER: user} if project != user else {USER: user}
    try:
        return {USER: user, PROJECT: os.path.abspath(PROJECT_FILE)}
    except FileNotFoundError:  # the working directory has been removed
        return {USER: user}


def facts_of(parsed: Parsed, paths: Mapping[str, str], unattended: bool) -> Facts:
    """Return what the questions depend on.

    Args:
        parsed: the flags of `headway config`.
        paths: that the profile can be written to, by place.
        unattended: no question is asked.

    Raises:
        ConfigError: a flag, an answers file, a variable or a profile is invalid.
    """
    machine = with_idle_gpus(machine_from_flags(parsed, os.environ)[0])
    if parsed.machine is None:
        parse_layers([environment_layer()])  # raises before any question is asked
    given = read_answers(parsed.answers) if parsed.answers else {}
    given |= _set_by_flag(parsed.set)
    if PLACE in given and given[PLACE].raw not in paths:
        raise ConfigError(
            f"{PLACE} is {given[PLACE].raw}, but here the profile is kept in {shown(paths[USER])}",
            where=str(given[PLACE].origin),
            fix=f"write `{PLACE}: {USER}`, or leave --profile out",
        )
    if unattended:
        given.setdefault(PLACE, Entry(USER, _ANSWERED))
    layers = {
        place: read_profile(path, LAYER_OF[place]) if is_there(path) else {}
        for place, path in paths.items()
    }
    for layer in layers.values():
        parse_layers([layer])
    profiles = {
        place: {key: entry.raw for key, entry in layer.items()} for place, layer in layers.items()
    }
    sources = [*layers.values(), given]
    is_asked_here = not unattended and parsed.machine is None
    return Facts(
        machine=machine,
        profiles=profiles,
        paths={place: shown(path) for place, path in paths.items()},
        given={name: entry.raw for name, entry in given.items()},
        problems=lambda values: problems_of(values, machine, sources),
        redetect=unattended,
        can_test=parsed.machine is None,
        partitions=_partitions() if is_asked_here else (),
        hostfiles=_hostfiles() if is_asked_here else (),
    )


def _partitions() -> tuple[Choice, ...]:
    """Return where jobs can be submitted to from here."""
    from headway.launcher.remote.slurm_jobs import partitions

    return tuple(
        Choice(one.name, f"{one.nodes} machine{'s' * (one.nodes != 1)}, time {one.time_limit}")
        for one in partitions()
    )


def _hostfiles() -> tuple[Choice, ...]:
    """Return the lists of hosts where tools that use one look for it."""
    found = []
    for name in HOSTFILES:
        # what is none; a working directory that has been removed
        with suppress(ConfigError, FileNotFoundError):
            path = os.path.abspath(name)
            # a profile can hold its path; and no pipe, for which somebody would have to be waited
            if path.isprintable() and os.path.isfile(path):
                hosts = read_hostfile(path, path)
                found.append(Choice(path, f"{len(hosts)} host{'s' * (len(hosts) != 1)}"))
    return tuple(found)


def _set_by_flag(words: Sequence[str]) -> dict[str, Entry]:
    """Return the entries of --set: settings, and answers to the questions in QUESTIONS."""
    questions = {name: raw for name, _, raw in (word.partition("=") for word in words)}
    settings = [word for word in words if word.partition("=")[0] not in QUESTIONS]
    origin = Origin(Layer.ASSIGNMENT, flag="--set")
    entries = {name: Entry(questions[name], origin) for name in QUESTIONS & questions.keys()}
    values = assignments(settings, "flag --set")
    return checked_answers(entries) | {name: Entry(raw, origin) for name, raw in values.items()}


def problems_of(
    values: Mapping[str, Raw], machine: Machine, sources: Sequence[Entries] = ()
) -> Sequence[Problem]:
    """Return the problems of a launch with `values`; a value found in `sources` has its origin."""
    known = {(name, str(entry.raw)): entry for layer in sources for name, entry in layer.items()}
    layer = {}
    for name, entry in _layer(values).items():
        origin = known.get((name, str(entry.raw)), entry).origin
        # in one layer, as they will be in one file
        layer[name] = entry._replace(origin=Origin(Layer.ANSWERS, reason=str(origin)))
    return launch_problems([layer], machine)


def _layer(values: Mapping[str, Raw]) -> Entries:
    return {name: Entry(raw, _ANSWERED) for name, raw in values.items()}
