"""`headway stack [PID]`: print the stacks of all ranks of a running launch."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil

from headway.commands.flags import Parser, usage_error
from headway.commands.tables import print_table
from headway.commands.top import HEAD, row_of
from headway.errors import Code, LaunchError
from headway.launcher.diagnosis.run_socket import ActiveRun, list_runs, request_stacks

_TIMEOUT_S = 60.0  # longer than the launcher waits for its ranks

PID = "PID: the process ID of the launcher or of a rank; optional if you have only one launch here"


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "stack",
        "Print the stacks of all ranks of a running `headway launch`, the time since the last "
        "progress, and the ranks that block other ranks. The ranks are not interrupted. Ctrl-\\ "
        "in the launcher's terminal does the same.",
        usage="headway stack [PID]",
        appendix=f"\n{PID}\n",
    )
    _, word = parser.parse_flag(argv, "process id")
    run = _only_run() if word is None else _run_of(_process(word))
    if run.is_suspended:
        raise LaunchError(
            "the launcher is suspended and cannot respond",
            where=f"process {run.pid}",
            fix=f"resume it with `fg` in its shell, or `kill -CONT {run.pid}`",
            code=Code.NO_LAUNCH,
        )
    print(f"launch {run.pid}, {run.program}: {_stacks(run.pid)}")
    return 0


def _stacks(pid: int) -> str:
    failure = "the launcher exited before it responded"
    try:
        text = request_stacks(pid, _TIMEOUT_S)
        if text is not None:
            return text
    except TimeoutError:
        failure = f"the launcher did not respond within {_TIMEOUT_S:.0f} s"
    raise LaunchError(failure, where=f"process {pid}", fix="check its output", code=Code.NO_LAUNCH)


def _process(text: str) -> psutil.Process:
    try:
        return psutil.Process(int(text))
    except (ValueError, psutil.NoSuchProcess):
        raise usage_error(
            f"{text!r} is not the ID of a running process", fix="`headway top` lists your launches"
        ) from None


def _only_run() -> ActiveRun:
    runs = list_runs()
    if len(runs) == 1:
        return runs[0]
    if runs:
        print_table(HEAD, [row_of(run) for run in runs])
        raise usage_error(
            f"{len(runs)} launches are running on this machine",
            fix=f"pass a process ID: `headway stack {runs[-1].pid}`",
        )
    raise LaunchError(
        "you have no running launches on this machine",
        where="the sockets of running launchers; a single process that was not started with "
        "--supervise has none",
        fix="run `headway stack` on the machine where the launch is running, as its user",
        code=Code.NO_LAUNCH,
    )


def _run_of(process: psutil.Process) -> ActiveRun:
    """Return the launch to which a process belongs, or the only launch among its descendants."""
    runs = {run.pid: run for run in list_runs()}
    for parent in (process, *process.parents()):
        if parent.pid in runs:
            return runs[parent.pid]
    _reject_other_user(process)
    below = [child.pid for child in process.children(recursive=True) if child.pid in runs]
    if len(below) == 1:
        return runs[below[0]]
    if below:
        raise LaunchError(
            f"process {process.pid} has {len(below)} launches among its descendants",
            where="the command line",
            fix=f"pass the ID of a launch: {', '.join(map(str, below))}",
            code=Code.COMMAND_LINE,
        )
    raise LaunchError(
        f"process {process.pid} does not belong to a launch whose launcher is running",
        where=f"its name is {process.name()!r}; a single process that was not started with "
        "--supervise has no launcher",
        fix="pass the ID of the launcher or of a rank of a running `headway launch`",
        code=Code.NO_LAUNCH,
    )


def _reject_other_user(process: psutil.Process) -> None:
    user = process.username()
    if process.uids().effective != os.geteuid():
        raise LaunchError(
            f"process {process.pid} belongs to another user, {user}",
            where="the command line; a launcher responds only to its own user",
            fix=f"ask {user}, or run `sudo -u {user} headway stack {process.pid}`",
            code=Code.NO_LAUNCH,
        )
