"""Plans for tests, of machines that are made up or recorded; nothing is started."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from headway.errors import HeadwayError, MachineError
from headway.ipc.origin import Layer, Origin
from headway.launcher.clusters.cluster_settings import assigned_rank, cluster_layer, job_in
from headway.launcher.plan.build import build_plan
from headway.launcher.plan.plan import LaunchPlan
from headway.launcher.plan.program import Program
from headway.machine.facts import Machine
from headway.settings.profile import Entries, Entry
from headway.settings.resolve import resolve
from headway.settings.table import TABLE, Settings
from tests.machines.recorded import load

LAPTOP = Machine(cores=8, cores_reason="8 usable cores")
SCRIPT = Program("train.py", ("--lr", "3"))


def said(layer: Layer, **values: Any) -> Entries:
    """Return a layer of settings, whose origins name it and the flags."""
    return {
        name: Entry(raw, Origin(layer, reason=f"{layer.label} {TABLE[name].flag}"))
        for name, raw in values.items()
    }


def settings_of(
    machine: Machine = LAPTOP,
    environ: Mapping[str, str] = {},
    *,
    layer: Layer = Layer.FLAG,
    joins_cluster: bool = False,
    **values: Any,
) -> Settings:
    """Return the settings of a machine on which these are said in this layer."""
    layers = [said(layer, **values)]
    cluster = cluster_layer(environ, layers) if joins_cluster else {}
    return resolve(layers, machine, environ, cluster)


def plan(
    machine: Machine = LAPTOP,
    environ: Mapping[str, str] | None = None,
    *,
    layer: Layer = Layer.FLAG,
    program: Program = SCRIPT,
    supervise: bool = False,
    in_process: bool = False,
    joins_cluster: bool = False,
    python: Sequence[str] = ("/bin/python",),
    **values: Any,
) -> LaunchPlan:
    """Return the plan for a machine on which these settings are said in this layer."""
    environ = environ or {}
    settings = settings_of(machine, environ, layer=layer, joins_cluster=joins_cluster, **values)
    return build_plan(
        settings,
        machine,
        program,
        python=python,
        environ=environ,
        supervise=supervise,
        in_process=in_process,
        task=assigned_rank(environ, settings),
        job=job_in(environ, settings),
    )


def set_by(launch: LaunchPlan) -> dict[str, str | None]:
    """Return the variables that a plan changes; None: it removes them."""
    return {name: change.value for name, change in launch.environment.items()}


def planned(
    machine: str,
    environ: Mapping[str, str] | None = None,
    *,
    layer: Layer = Layer.FLAG,
    **values: Any,
) -> LaunchPlan:
    """Return the plan for a recorded machine."""
    return plan(load(machine), environ, layer=layer, **values)


def refusal(machine: str, kind: type[HeadwayError] = MachineError, **values: Any) -> str:
    """Return the error for what cannot be done on a recorded machine.

    Each way out, such as `pass --devices all`, is taken as it is printed: the error is gone then.
    """
    with pytest.raises(kind) as caught:
        planned(machine, **values)
    for problem in caught.value.problems:
        for way in ways_out(problem.fix, values):
            assert problem.what not in problems_of(machine, way), problem.fix
    return str(caught.value)


def problems_of(machine: str, values: dict[str, Any]) -> list[str]:
    try:
        planned(machine, **values)
    except HeadwayError as error:
        return [problem.what for problem in error.problems]
    return []


def ways_out(fix: str, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the settings after each alternative of a fix that passes flags or leaves them out."""
    for way in re.split(r"; or |, or ", fix):
        passed = re.findall(r"pass --([\w-]+) ([^\s,;`]+)", way)
        left = re.findall(r"omit --([\w-]+)", way)
        if passed or left:
            kept = {name: v for name, v in values.items() if name.replace("_", "-") not in left}
            yield {**kept, **{name.replace("-", "_"): value for name, value in passed}}
