"""`headway why [RUN]`: show the result of a run, and the changes since the last successful run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from headway.commands import runs
from headway.commands.changes import changes
from headway.commands.flags import Parser
from headway.commands.tables import when
from headway.errors import Code, ConfigError
from headway.history.record import RunRecord, find, last_successful, read_all
from headway.ipc.records import SAVED
from headway.ipc.stderr import shown


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "why",
        "Show the result of a run, with the report of its failure, and the changes since the last "
        "successful run of the same script: settings, arguments, code and commit, variables, "
        "machine, data and packages.",
        usage="headway why [--json | --html FILE] [RUN]",
        appendix=f"\n{runs.RUN}\n",
    )
    parser.flag("--json", help="print one JSON object")
    parser.flag("--html", metavar="FILE", help="write a self-contained HTML page with charts")
    parsed, name = parser.parse_flag(argv, "run")
    if parsed.json and parsed.html is not None:
        parser.error("--json and --html are mutually exclusive: pass one of them")
    record = find(name)
    good = last_successful(record, read_all()[0])
    found = [] if good is None else changes(good, record)
    if parsed.html is not None:
        from headway.commands.run_page import page

        _write(parsed.html, page(record, good, found))
        print(parsed.html)
    elif parsed.json:
        report = "" if record.end is None else record.end.report
        compared = None if good is None else good.name
        result = {**runs.as_json(record), "report": report, "compared_with": compared}
        print(json.dumps({**result, "changes": [change._asdict() for change in found]}, indent=2))
    else:
        _print(record)
        if good is None:
            print("\nno earlier successful run of this script is recorded")
        elif found:
            print(f"\nchanged since run {good.name}, which succeeded:")
            for change in found:
                print(f"  {shown(str(change))}")
                for line in change.detail.splitlines():
                    print(f"      {shown(line)}")
        else:
            print(f"\nno recorded changes since run {good.name}, which succeeded")
        if line := runs.command_line(record):
            print(f"\nto repeat it:\n  {line}")
    return 0


def _print(record: RunRecord) -> None:
    start, end = record.start, record.end
    ranks = start.num_processes * start.num_machines
    print(f"run {record.name}: {shown(start.program)} on {ranks} rank{'s' * (ranks > 1)}")
    print(
        f"began {when(start.began_at)}, took {runs.duration(record)}, ended: {runs.outcome(record)}"
    )
    if spent := runs.time_shares(record):
        print(f"time: {spent}")
    for number, line in enumerate(runs.restarts(record)):
        print("  " * bool(number) + shown(line))
    for kept in record.kept:
        print(f"{kept.what}: {shown(kept.path)}")
    if slow := runs.slow_rank(record):
        print(slow)
    if end is not None and end.report not in ("", SAVED):
        print()
        for line in end.report.splitlines():
            print(shown(line))
    elif end is None and runs.outcome(record) == runs.UNKNOWN:
        alone = ", or it created no Accelerator" if start.supervised is None else ""
        print(f"the run's exit was not recorded: the run was killed, or its machine stopped{alone}")
    if record.commit is None:
        print(
            "git found no commit of the script, so changes to the code are not recorded;"
            f" `git -C {shlex.quote(start.folder)} log` shows why"
        )


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}",
            where="--html",
            fix="pass a file in an existing, writable folder",
            code=Code.UNWRITABLE,
        ) from None
