"""`headway config export`: the settings of a launch on this machine, for another tool."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence

from headway.commands.config.check import SCRIPT
from headway.commands.exchange.accelerate_file import not_in_accelerate, to_accelerate
from headway.commands.exchange.torchrun_export import not_in_torchrun, to_torchrun
from headway.commands.flags import Parser, machine_from_flags
from headway.errors import ConfigError, MachineError
from headway.launcher.clusters.cluster import cluster_layer
from headway.launcher.planning.plan import LaunchPlan, build_plan
from headway.launcher.planning.program import Program
from headway.machine.facts import Machine
from headway.settings.layers import launch_layers, profile_layers
from headway.settings.resolve import resolve
from headway.settings.table import TABLE, Settings

FORMATS = ("torchrun", "env", "sh", "accelerate")


def export(argv: Sequence[str]) -> int:
    """Print the settings of a launch on this machine, for another tool."""
    parser = Parser("config export", "Print the settings of a launch here, for another tool.")
    parser.flag("--format", metavar="{" + ",".join(FORMATS) + "}", help="how to print them")
    parser.profile_flag()
    parser.machine_flag()
    parsed = parser.parse_flags(argv)
    if parsed.format is None:
        parser.error(f"--format is required: one of {', '.join(FORMATS)}")
    if parsed.format not in FORMATS:
        parser.error(f"--format is {parsed.format!r}, but it must be one of {', '.join(FORMATS)}")
    machine, environ = machine_from_flags(parsed, os.environ)
    layers = launch_layers(profile_layers(profile=parsed.profile), environ)
    settings = resolve(layers, machine, environ, cluster_layer(environ))
    names = list(dict.fromkeys(name for layer in layers for name in layer))
    if parsed.format == "torchrun":
        plan = _lasting_plan(settings, machine)
        print(to_torchrun(plan, [SCRIPT]))
        _report_missing(not_in_torchrun(plan, names))
    elif parsed.format == "accelerate":
        import yaml

        plan = _lasting_plan(settings, machine)
        config = to_accelerate(plan)
        print(yaml.safe_dump(config, sort_keys=False), end="")
        _report_missing(not_in_accelerate(plan, names))
        if config["distributed_type"] == "MULTI_CPU":
            print(
                "headway: note: Accelerate starts one process on a CPU unless mpirun_hostfile is "
                "set; torchrun (--format torchrun) starts all",
                file=sys.stderr,
            )
    else:
        for name in names:
            if settings.values[name].value is not None:  # such as the port on one machine
                print(_assignment(name, settings, parsed.format))
    return 0


def _lasting_plan(settings: Settings, machine: Machine) -> LaunchPlan:
    """Return the plan of a launch, which must be the same at any time."""
    if settings.devices.idle is not None:
        raise ConfigError(
            f"devices is {str(settings.devices)!r}, but idle GPUs are only chosen at a launch",
            where=str(settings.origin("devices")),
            fix="set devices to GPU indices, or use --format env or sh",
        )
    try:
        return build_plan(settings, machine, Program(SCRIPT), python=["python"], environ={})
    except MachineError as error:
        there = "run `headway env --json` on the machine it is for, and pass --machine FILE; or "
        raise MachineError.of(
            [problem._replace(fix=there + problem.fix) for problem in error.problems]
        ) from None


def _report_missing(names: Iterable[str]) -> None:
    for name in names:
        print(f"headway: note: {name} is not exported: it has no counterpart", file=sys.stderr)


def _assignment(name: str, settings: Settings, style: str) -> str:
    """Return a line that sets the variable of a setting, for a shell or an env file."""
    value = settings.values[name].value
    if name == "env":
        text = shlex.join(f"{k}={v}" for k, v in value.items())
    else:
        text = ",".join(map(str, value)) if name == "ranks" else str(value)
    if style == "sh":
        return f"export {TABLE[name].variable}={shlex.quote(text)}"
    if "\n" in text:
        raise ConfigError(
            f"{name} contains a line break, which an env file cannot express",
            where=str(settings.origin(name)),
            fix="use --format sh",
        )
    return f"{TABLE[name].variable}={text}"
