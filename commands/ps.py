"""`headway ps`: list this user's running launches on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headway.commands.flags import Parser
from headway.commands.tables import print_table, when
from headway.contract.records import shown
from headway.launcher.diagnosis.run_socket import Run, list_runs

HEAD = ("pid", "program", "ranks", "since")


def main(argv: Sequence[str]) -> int:
    """Run `headway ps` with these words and return the exit code."""
    parser = Parser(
        "ps",
        "List your running launches on this machine: the launcher's process id, the program, its "
        "ranks here, since when, and its working folder. A single process has no launcher, and is "
        "listed only with `headway launch --supervise`.",
    )
    parser.flag("--json", help="print one JSON object: {runs}")
    parsed = parser.parse_flags(argv)
    runs = list_runs()
    if parsed.json:
        found = [{**run._asdict(), "folder": folder_of(run.pid)} for run in runs]
        print(json.dumps({"runs": found}, indent=2))
    else:
        print_runs(runs)
    return 0


def print_runs(runs: Sequence[Run]) -> None:
    """Print launches as a table."""
    rows = [(*row_of(run), shown(folder_of(run.pid) or "-")) for run in runs]
    print_table((*HEAD, "folder"), rows)


def row_of(run: Run) -> tuple[str, ...]:
    """Return the cells of a launch."""
    if run.is_suspended:
        return str(run.pid), "-", "its launcher is suspended", when(run.began_at)
    return str(run.pid), shown(run.program), run.ranks, when(run.began_at)


def folder_of(pid: int) -> str | None:
    """Return the working folder of a process; None for one that has ended meanwhile."""
    import psutil

    try:
        return str(psutil.Process(pid).cwd())
    except (psutil.Error, OSError):
        return None
