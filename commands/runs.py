"""`headway runs`: list recorded runs."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Sequence

from headway.commands.flags import Parser
from headway.commands.tables import print_table, when
from headway.history.record import RunRecord, is_running, read_all
from headway.ipc.records import REPEATED, SAVED, STOPPED_AND_SAVED
from headway.ipc.stderr import log, shown
from headway.launcher.remote.protocol import RUN_VARIABLES
from headway.launcher.step_stats.slow_rank import find_slow_rank, mean_step

RUN = "RUN: a name listed by `headway runs`, or its beginning or end (default: the newest run)."
UNKNOWN = "unknown"
"""The status of a run whose exit was not recorded."""
_SIGNALS = {128 + each: f" ({each.name})" for each in signal.Signals}
_NAMED = {0: "ok", STOPPED_AND_SAVED: SAVED, REPEATED: "repeated failure"}
_LEAST_STEPS = 20  # before a rank can be reported as slow
_MAX_SCRIPT = 22  # characters, where nothing is wrapped; `--json` has all
_OPTIONAL = ("restarts", "training", "samples/s", "steps", "began", "ranks")
"""Columns that are omitted if the terminal is narrow, or if no run has a value for them."""
_HEAD = (
    *("run", "began", "script", "ranks", "ended", "restarts", "steps", "samples/s", "training"),
    "took",
)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "runs",
        "List recorded runs, newest last, with their start, result, steps and speed. `headway "
        "launch` records each run, unless the setting record is off, and keeps the last 200.",
        usage="headway runs [--json]",
    )
    parser.flag("--json", help="print one JSON list")
    parsed = parser.parse_flags(argv)
    records, refused = read_all()
    if parsed.json:
        print(json.dumps([as_json(record) for record in records], indent=2))
    else:
        rows = [_row(record, _script(record, records)) for record in records]
        if omitted := print_table(_HEAD, rows, _OPTIONAL):
            columns = ", ".join(name for name in _HEAD if name in omitted)
            log(
                f"columns omitted on this narrow terminal: {columns}; `headway runs --json` has all"
            )
        if not rows:
            log("no runs are recorded yet: `headway launch` records each run")
        if records and (line := command_line(records[-1])):
            log(f"to repeat the newest: {line}")
        if any(record.end is None and not is_running(record) for record in records):
            log(
                f"{UNKNOWN}: the exit of a killed run, or of a single process without an"
                " Accelerator, is not recorded; --supervise records it"
            )
    if refused:
        others = len(refused) - 1
        log(f"note: {refused[-1]}" + f"; {others} more cannot be read" * (others > 0))
    return 0


def as_json(record: RunRecord) -> dict[str, object]:
    start, end, restarted = record.start, record.end, record.attempts[1:]
    return {
        "run": record.name,
        "began_at": start.began_at,
        "script": start.script or start.program,
        "arguments": list(start.arguments),
        "ranks": start.num_processes * start.num_machines,
        "ended": outcome(record),
        "exit_code": None if end is None else end.exit_code,
        "steps": record.num_steps or None,
        "samples_per_s": record.samples_per_s,
        "time": record.shares,
        "restarts": [{"cause": row.cause, "step": row.failed_at_step} for row in restarted],
        "restarts_used": _restarts_used(record),
        "duration_s": None if end is None else max(end.time - start.began_at, 0.0),
        "path": record.path,
        "command": command_line(record),
    }


def command_line(record: RunRecord) -> str:
    """Return the shell command that repeats the launch, with secrets masked.

    The result is empty if the command contains unprintable characters.
    """
    start = record.start
    settings = {
        name: value
        for name, value in start.variables.items()
        if name.startswith("HEADWAY_") and name not in RUN_VARIABLES
    }
    assigned = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    words = " ".join([*assigned, "headway launch", shlex.join(start.command)])
    line = f"cd {shlex.quote(start.folder)} && {words}"
    return line if line.isprintable() else ""


def _script(record: RunRecord, records: Sequence[RunRecord]) -> str:
    """Return the script as typed; if other runs' scripts have the same name, return its path."""
    name, path = record.start.program, record.start.script
    is_only = {record.start.script for record in records if record.start.program == name} == {path}
    script = name if is_only else path or name
    is_long = len(script) > _MAX_SCRIPT and not sys.stdout.isatty()
    return "..." + script[3 - _MAX_SCRIPT :] if is_long else script


def _row(record: RunRecord, script: str) -> tuple[str, ...]:
    start, speed = record.start, record.samples_per_s
    return (
        record.name,
        when(start.began_at),
        shown(script),
        str(start.num_processes * start.num_machines),
        outcome(record),
        _restarts_used(record) if record.attempts[1:] else "-",
        str(record.num_steps or "-"),
        "-" if speed is None else f"{speed:,.0f}" if speed >= 1000 else f"{speed:.4g}",
        "-" if (parts := record.shares) is None else f"{parts['training'] * 100:.0f} %",
        duration(record),
    )


def outcome(record: RunRecord) -> str:
    if record.end is None:
        return "running" if is_running(record) else UNKNOWN
    code = record.end.exit_code
    if code is None:
        return "code unknown"
    if record.end.report == SAVED:
        return SAVED + _SIGNALS.get(code, "")
    return _NAMED.get(code, f"exit code {code}{_SIGNALS.get(code, '')}")


def duration(record: RunRecord) -> str:
    """Return the duration of a run, or `-` if unknown."""
    if record.end is None:
        return "-"
    return _formatted(max(record.end.time - record.start.began_at, 0.0))


def _formatted(seconds: float) -> str:
    if not seconds < 1e9:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours}:{minutes:02}:{int(seconds) % 60:02}"


def time_shares(record: RunRecord) -> str:
    """Return the breakdown of a run's wall time; empty if unknown."""
    wall_s = record.end.time - record.start.began_at if record.end is not None else 0.0
    return ", ".join(
        f"{part * 100:.1f} % {name} ({_formatted(part * wall_s)})"
        for name, part in (record.shares or {}).items()
        if part >= 0.0005
    )


def restarts(record: RunRecord) -> list[str]:
    """Return the number of restarts used, and the cause of each."""
    causes = [
        attempt.cause + (f" at step {attempt.failed_at_step}" if attempt.failed_at_step else "")
        for attempt in record.attempts[1:]
    ]
    return [f"{_restarts_used(record)} restarts used", *causes] if causes else []


def _restarts_used(record: RunRecord) -> str:
    used = record.attempts[-1].num_restarts if record.attempts else 0
    return f"{used} of {record.start.settings['max_restarts']}"


def slow_rank(record: RunRecord) -> str:
    """Describe the rank that all other ranks waited for; empty if no rank was slow."""
    times = {rank: found for rank, rows in record.stats.items() if (found := mean_step(rows))}
    slow = find_slow_rank(times) if record.num_steps >= _LEAST_STEPS else None
    return "" if slow is None else slow.describe()
