"""Formats the full description of a plan, which `--dry-run` prints."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from headway.ipc.run_contract import RANK_VARIABLES, VARIABLE
from headway.ipc.secrets import masked_command
from headway.ipc.stderr import shown
from headway.launcher.plan.plan import LaunchPlan, counted, summary, text_of, without_secrets
from headway.launcher.plan.program import HOOKS
from headway.machine.devices import gpu_labels
from headway.settings.setting import Value
from headway.settings.table import TABLE, Settings


def describe(plan: LaunchPlan, show_secrets: bool = False) -> str:
    plan = plan if show_secrets else without_secrets(plan)
    settings = plan.settings
    start = [
        ("command", shlex.join(plan.program.command(plan.python)), ""),
        ("how", *_how(plan)),
        ("hooks", *_hooked(plan)),
    ]
    if plan.gpus:
        labels = gpu_labels(plan.machine.visible_gpus)
        gpus = [labels[index].removeprefix("GPU ") for index in plan.gpus]
        start.append(("gpus", ", ".join(gpus), settings.devices.describe()))
    if plan.cpus:
        cores = "; ".join(dict.fromkeys(plan.cpus))
        start.append(("cores", cores, str(settings.origin("numa_binding"))))
    environment = _columns([_changed(*item) for item in plan.environment.items()])
    if plan.supervised is not None:
        environment.append(f"and for each rank {', '.join(RANK_VARIABLES[:6])}, ...")
    lines = [
        summary(plan),
        *_section("settings", settings_table(settings).splitlines()),
        *_section("start", _columns(start)),
        *_section("environment", environment),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def describe_step(settings: Settings, command: Sequence[str], show_secrets: bool) -> str:
    words = command if show_secrets else masked_command(command)
    shown = settings if show_secrets else settings.without_secrets()
    machines = counted(settings.num_machines, "machine", "machines")
    lines = [
        f"srun starts one launch on each of {machines}",
        *_section("settings", settings_table(shown).splitlines()),
        *_section("start", [shlex.join(words)]),
        "note: hardware is detected again on each machine",
    ]
    return "\n".join(lines)


def _section(title: str, rows: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {row}" for row in rows)]


def settings_table(settings: Settings, with_origin: bool = True) -> str:
    rows = []
    for name in TABLE:
        value, origin = settings.values[name]
        rows.append((name, text_of(value), str(origin) if with_origin else ""))
    return "\n".join(_columns(rows))


def _how(plan: LaunchPlan) -> tuple[str, str]:
    if plan.in_process:
        return "in this interpreter", "flag --in-process"
    if plan.task is not None:
        started = f"one task per rank: this is rank {plan.task.rank}"
        return "exec", f"{plan.settings.cluster} started {started}"
    if plan.supervised is None:
        return "exec", "the script replaces the launcher"
    return "torch's elastic agent", plan.supervised


def _hooked(plan: LaunchPlan) -> tuple[str, str]:
    if plan.not_hooked is not None:
        return "no library", plan.not_hooked
    names = ", ".join(dict.fromkeys(hook.name for hook in HOOKS))
    return names, "each is hooked when the script imports it"


def _changed(name: str, change: Value) -> tuple[str, str, str]:
    if change.value is None:
        return f"- {name}", "", str(change.origin)
    value = "(internal: the settings, for the script)" if name == VARIABLE else change.value
    return f"+ {name}", value, str(change.origin)


def _columns(rows: list[tuple[str, str, str]]) -> list[str]:
    """Align three columns; a very long cell does not widen its column."""
    rows = [(shown(name), shown(value), shown(origin)) for name, value, origin in rows]
    widths = [min(max(len(row[column]) for row in rows), 44) for column in (0, 1)]
    return [
        f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}".rstrip()
        for name, value, origin in rows
    ]
