"""`headway logs [RUN]`: what the ranks of a run have printed, as far as it was kept."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence

from headway.commands.flags import Parser
from headway.commands.follow import follow_job, write
from headway.commands.runs import RUN
from headway.contract.notes import say
from headway.contract.records import LOGS
from headway.errors import ConfigError
from headway.history.record import Record
from headway.history.store import find, is_running
from headway.launcher.remote.slurm_jobs import copy_new

_EVERY_S = 0.5
_LOG = re.compile(r"rank_(\d+)_attempt_(\d+)\.log")
_FIX = "launch with --log-dir DIR, which keeps all output"


def main(argv: Sequence[str]) -> int:
    """Run `headway logs` with these words and return the exit code."""
    parser = Parser(
        "logs",
        "Print what the ranks of a run have printed: all of it with --log-dir, else the last 200 "
        "lines of each rank, once they have ended.",
        usage="headway logs [--rank R] [--follow] [RUN]",
        appendix=f"\n{RUN}\n",
    )
    parser.flag("--rank", metavar="R", help="of this rank alone")
    parser.flag(
        "--follow", short="-f", help="go on until the run has ended; of a job, as `headway follow`"
    )
    parsed, name = parser.parse_one(argv, "run")
    if parsed.rank is not None and not parsed.rank.isdecimal():
        parser.error(f"--rank is the number of a rank, not {parsed.rank!r}")
    record = find(name)
    rank = None if parsed.rank is None else int(parsed.rank)
    files = list(_files(record, rank))
    if parsed.follow:
        return _follow(record, rank)
    if files:
        for path in files:
            _begin(path, files)
            copy_new(path, 0, write)
        return 0
    tails = {one: lines for one, lines in record.tails.items() if rank in (None, one)}
    if not tails:
        raise ConfigError(_missing(record, rank), where=record.path, fix=_FIX)
    for one, lines in sorted(tails.items()):
        for line in lines:
            prefix = f"[{one}] " if len(tails) > 1 else ""
            print(f"{prefix}{line}")
    return 0


def _files(record: Record, rank: int | None) -> Iterator[str]:
    """Yield the log files of a run, in the order of attempts and ranks."""
    for kept in record.kept:
        if kept.what == LOGS and os.path.isdir(kept.path):
            found = [match for name in os.listdir(kept.path) if (match := _LOG.fullmatch(name))]
            for match in sorted(found, key=lambda one: (int(one[2]), int(one[1]))):
                if rank in (None, int(match[1])):
                    yield os.path.join(kept.path, match[0])


def _follow(record: Record, rank: int | None) -> int:
    """Show what is printed until the run has ended; return its exit code."""
    if record.start.job and rank is None:
        return follow_job(record.start.job)
    read: dict[str, int] = {}
    if not any(kept.what == LOGS for kept in record.kept):
        raise ConfigError(
            f"the output of run {record.name} is kept in no file that could be followed",
            where=record.path,
            fix=_FIX,
        )
    try:
        while True:
            goes_on = is_running(record)
            for path in _files(record, rank):
                if path not in read:
                    _begin(path, [*_files(record, rank)])
                    read[path] = 0
                read[path] += copy_new(path, read[path], write)
            record = find(record.name)
            if not goes_on:
                return (record.end.exit_code or 0) if record.end is not None else 0
            time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        say("the run goes on")
        return 130


def _begin(path: str, files: Sequence[str]) -> None:
    if len(files) > 1:
        sys.stdout.flush()
        write(f"==> {path} <==\n".encode(errors="backslashreplace"))


def _missing(record: Record, rank: int | None) -> str:
    of = "" if rank is None else f" of rank {rank}"
    if is_running(record):
        return f"the output{of} of run {record.name} goes to its terminal, and to no file"
    if record.start.supervised is None:
        return f"run {record.name} was a single process: its output went to its terminal alone"
    return f"no output{of} of run {record.name} was kept"
