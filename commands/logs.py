"""`headway logs [RUN]`: print the output of the ranks of a run, or of a SLURM job."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence

from headway.commands.flags import Parser
from headway.commands.runs import RUN
from headway.errors import Code, ConfigError
from headway.history.record import RunRecord, find, is_running
from headway.ipc.records import LOGS
from headway.ipc.stderr import log, named
from headway.launcher.remote import slurm_jobs

_EVERY_S = 0.5  # between reads of the growing files, with --follow
_INTERRUPTED = 130
_LOG = re.compile(r"rank_(\d+)_attempt_(\d+)\.log")
_FIX = (
    "launch with --log-dir DIR to keep all output, also of a single process and while it runs;"
    " otherwise, the last lines of each rank are recorded when it exits"
)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "logs",
        "Print the output of the ranks of a run: all output if it was launched with --log-dir, "
        "otherwise the last 200 lines of each rank after the rank has exited.",
        usage="headway logs [--rank R] [--follow] [RUN | JOB]",
        appendix=f"\n{RUN}\nJOB: with --follow, the ID of a SLURM job, such as 12 or 12_3\n",
    )
    parser.flag("--rank", metavar="R", help="print only the output of this rank")
    parser.flag(
        "--follow",
        short="-f",
        help="print new output until the run or job ends, and exit with its exit code; after "
        "Ctrl-C, the run or job continues",
    )
    parsed, name = parser.parse_flag(argv, "run")
    if parsed.rank is not None and not parsed.rank.isdecimal():
        parser.error(f"invalid value {parsed.rank!r} for --rank: not a rank")
    rank = None if parsed.rank is None else int(parsed.rank)
    if parsed.follow and name is not None and slurm_jobs.is_job_id(name):
        if rank is not None:
            parser.error("--rank applies only to runs: the output of a job includes all ranks")
        return follow_job(name)
    record = find(name)
    num_ranks = record.start.num_processes * record.start.num_machines
    if rank is not None and rank >= num_ranks:
        parser.error(f"--rank is {rank}, but run {record.name} has ranks 0 to {num_ranks - 1}")
    if parsed.follow:
        return _follow(record, rank)
    files = list(_files(record, rank))
    if files:
        for path in files:
            _print_name(path, files)
            slurm_jobs.copy_new(path, 0, _write)
        return 0
    known = {number: lines for number, lines in record.tails.items() if rank in (None, number)}
    tails = {number: lines for number, lines in known.items() if any(lines)}
    if known and not tails and "debug_rank" not in record.start.origins:
        log(f"{named([*known])} of run {record.name} printed nothing")
        return 0
    if not tails:
        has_started = record.end is None or record.attempts
        if record.start.supervised is not None and not has_started:
            log(f"run {record.name} ended before its ranks started")
            return 0
        of = "" if rank is None else f" of rank {rank}"
        what = f"the output{of} of run {record.name} is not kept in files or in its record"
        raise ConfigError(what, where=record.path, fix=_FIX, code=Code.NO_RUN)
    for number, lines in sorted(tails.items()):
        for line in lines:
            prefix = f"[{number}] " if len(tails) > 1 else ""
            print(f"{prefix}{line}")
    return 0


def follow_job(job: str) -> int:
    """Print a job's output until it ends or Ctrl-C is pressed; return the exit code.

    Raises LaunchError if the job is unknown to SLURM.
    """
    try:
        ended = slurm_jobs.follow(job, _write, log)
    except KeyboardInterrupt:
        ended = slurm_jobs.state_of(job)
        if not ended.has_ended:
            again = f"`headway logs --follow {job}` shows it again, `scancel {job}` cancels it"
            log(f"job {job} is still running; {again}")
            return _INTERRUPTED
    log(f"job {job} ended: {ended.name}, exit code {ended.exit_code}")
    return ended.exit_code


def _files(record: RunRecord, rank: int | None) -> Iterator[str]:
    """Yield the log files of a run, in the order of attempts and then of ranks."""
    for kept in record.kept:
        if kept.what == LOGS and os.path.isdir(kept.path):
            found = [match for name in os.listdir(kept.path) if (match := _LOG.fullmatch(name))]
            for match in sorted(found, key=lambda m: (int(m[2]), int(m[1]))):
                if rank in (None, int(match[1])):
                    yield os.path.join(kept.path, match[0])


def _follow(record: RunRecord, rank: int | None) -> int:
    """Print the output of a run until it ends; return its exit code, or 1 if it is unknown."""
    if record.start.job and rank is None:
        return follow_job(record.start.job)
    if "log_dir" not in record.start.origins:
        raise ConfigError(
            f"the output of run {record.name} is not kept in files, so it cannot be followed",
            where=record.path,
            fix=_FIX,
            code=Code.NO_RUN,
        )
    read: dict[str, int] = {}
    try:
        while True:
            may_grow = is_running(record)
            files = [*_files(record, rank)]
            for path in files:
                if path not in read:
                    _print_name(path, files)
                read[path] = read.get(path, 0)
                read[path] += slurm_jobs.copy_new(path, read[path], _write)
            if not may_grow:
                break
            time.sleep(_EVERY_S)
            record = find(record.name)
    except KeyboardInterrupt:
        log("the run is still active")
        return _INTERRUPTED
    code = None if record.end is None else record.end.exit_code
    if code is None:
        log("the run has ended; its exit code is unknown")
    return 1 if code is None else code


def _print_name(path: str, files: Sequence[str]) -> None:
    if len(files) > 1:
        sys.stdout.flush()
        _write(f"==> {path} <==\n".encode(errors="backslashreplace"))


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
