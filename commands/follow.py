"""`headway follow JOB`: the output of a job that `headway launch --submit` started, to its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headway.commands.flags import Parser, bad_words
from headway.contract.notes import say
from headway.launcher.remote import slurm_jobs

_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Run `headway follow` with these words and return the exit code."""
    parser = Parser(
        "follow",
        "Show the output of a job of SLURM until it has ended, and end with its exit code. Ctrl-C "
        "leaves the job alone.",
        usage="headway follow JOB",
    )
    _, words = parser.parse_words(argv)
    if len(words) != 1 or not slurm_jobs.is_job_id(words[0]):
        raise bad_words(
            "headway follow takes the id of one job, such as 12 or 12_3",
            fix="`squeue --me` lists your jobs",
        )
    return follow_job(words[0])


def follow_job(job: str) -> int:
    """Show a job's output until it has ended or Ctrl-C comes; return the exit code.

    Raises:
        LaunchError: SLURM does not know the job.
    """
    try:
        ended = slurm_jobs.follow(job, write, say)
    except KeyboardInterrupt:
        ended = slurm_jobs.state_of(job)
        if not ended.has_ended:
            again = f"`headway follow {job}` shows it again, `scancel {job}` ends it"
            say(f"job {job} goes on; {again}")
            return _INTERRUPTED
    say(f"job {job} ended: {ended.name}, exit code {ended.exit_code}")
    return ended.exit_code


def write(data: bytes) -> None:
    """Write bytes on standard output at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
