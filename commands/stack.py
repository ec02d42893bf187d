"""`headway stack [PID]`: print where all ranks of a running launch are."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil

from headway.commands.flags import Parser, bad_words
from headway.commands.tables import print_table
from headway.commands.top import HEAD, row_of
from headway.errors import LaunchError
from headway.launcher.diagnosis.run_socket import ActiveRun, ask_for_stacks, list_runs

_TIMEOUT_S = 60.0  # ranks have some seconds to answer the launcher

PID = (
    "PID: the process id of the launcher or of a rank; not needed if one launch of yours runs here"
)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "stack",
        "Print the stacks of all ranks of a running `headway launch`, how long ago the last "
        "progress was, and which ranks keep the others waiting. Nothing in the ranks is "
        "interrupted. Ctrl-\\ in the launcher's own terminal does the same.",
        usage="headway stack [PID]",
        appendix=f"\n{PID}\n",
    )
    _, word = parser.parse_flag(argv, "process id")
    run = _only_run() if word is None else _run_of(_process(word))
    if run.is_suspended:
        raise LaunchError(
            "the launcher is suspended, and cannot answer",
            where=f"process {run.pid}",
            fix=f"let it go on: `fg` in its shell, or `kill -CONT {run.pid}`",
        )
    print(_stacks(run.pid))
    return 0


def _stacks(pid: int) -> str:
    failure = "the launcher ended before it answered"
    try:
        text = ask_for_stacks(pid, _TIMEOUT_S)
        if text is not None:
            return text
    except TimeoutError:
        failure = f"the launcher did not answer within {_TIMEOUT_S:.0f} s"
    raise LaunchError(failure, where=f"process {pid}", fix="look at its own output")


def _process(text: str) -> psutil.Process:
    try:
        return psutil.Process(int(text))
    except (ValueError, psutil.NoSuchProcess):
        raise bad_words(
            f"{text!r} is not the id of a running process", fix="`headway top` lists your launches"
        ) from None


def _only_run() -> ActiveRun:
    runs = list_runs()
    if len(runs) == 1:
        return runs[0]
    if runs:
        print_table(HEAD, [row_of(run) for run in runs])
        raise bad_words(
            f"{len(runs)} launches run on this machine",
            fix=f"pass the process id of one: `headway stack {runs[-1].pid}`",
        )
    raise LaunchError(
        "no launch of yours runs on this machine",
        where="the sockets of running launchers; a single process that was not started with "
        "--supervise has none",
        fix="run `headway stack` on the machine of the launch, and as its user",
    )


def _run_of(process: psutil.Process) -> ActiveRun:
    """Return the launch of `process`: its own, a parent's, or the only one below it."""
    runs = {run.pid: run for run in list_runs()}
    for parent in (process, *process.parents()):
        if parent.pid in runs:
            return runs[parent.pid]
    _refuse_another_user(process)
    below = [child.pid for child in process.children(recursive=True) if child.pid in runs]
    if len(below) == 1:
        return runs[below[0]]
    if below:
        raise LaunchError(
            f"process {process.pid} has {len(below)} launches below it",
            where="the command line",
            fix=f"pass the id of one: {', '.join(map(str, below))}",
        )
    raise LaunchError(
        f"process {process.pid} belongs to no launch that has a launcher",
        where=f"its name is {process.name()!r}; a single process that was not started with "
        "--supervise has no launcher",
        fix="pass the id of the launcher or of a rank of a running `headway launch`",
    )


def _refuse_another_user(process: psutil.Process) -> None:
    user = process.username()
    if process.uids().effective != os.geteuid():
        raise LaunchError(
            f"process {process.pid} is of another user, {user}",
            where="the command line; a launcher answers its own user only",
            fix=f"ask {user}, or `sudo -u {user} headway stack {process.pid}`",
        )
