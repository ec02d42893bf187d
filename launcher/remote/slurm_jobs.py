"""Writes and submits SLURM batch scripts, and reads a job's output, state and exit code."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from headway._version import __version__
from headway.errors import Code, LaunchError, MachineError

_MIN_POLL_S, _MAX_POLL_S = 1.0, 15.0  # between queries of SLURM's controller, which all users share
_READ_EVERY_S = 0.5  # between reads of the job's log, which do not query SLURM
_CHUNK_BYTES = 1 << 16
_ENDED = {  # squeue(1), "JOB STATE CODES"
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
_NOTICE_AT = 2  # polls of a running job without its log, which shared folders show late

_BODY = """\
# the last job of an array has the id of the array
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
# deadline for saving; older SLURM releases do not set it, and some jobs have none
end=$(squeue --noheader --jobs "$job" --format %e)
export SLURM_JOB_END_TIME="${{SLURM_JOB_END_TIME:-$(date --date "$end" +%s 2>/dev/null)}}"
trap : TERM  # the job's step gets its own SIGTERM, saves and exits with code 75
{command}
code=$?
again=$code
if [ "$code" -eq 143 ]; then  # preempted before anything was saved: rerun
    case $(squeue --noheader --jobs "$job" --Format preempttime) in [0-9]*) again=75 ;; esac
fi
# requeue, unless the job is being cancelled and no longer RUNNING
if [ "$again" -eq 75 ] && [ "$(squeue --noheader --jobs "$job" --format %T)" = RUNNING ]; then
    scontrol requeue "$job"
fi
if [ "$code" -eq 76 ]; then  # it would fail again in the same way, even if 76 is in RequeueExit
    scontrol update "JobId=$job" Requeue=0
fi
exit "$code"
"""


class JobState(NamedTuple):
    """The state of a job, as reported by SLURM."""

    name: str  # RUNNING, PENDING, FAILED, ...
    reason: str = ""  # why it is pending, or why it ended
    log: str = ""  # path of its output, if SLURM reports it
    code: int = 0  # the exit code of its script
    signal: int = 0  # the signal that killed its script; 0 for none

    @property
    def has_ended(self) -> bool:
        return self.name in _ENDED

    @property
    def exit_code(self) -> int:
        """The exit code for a command that follows the job, once the job has ended."""
        if self.code or self.signal:
            return self.code or 128 + self.signal
        return int(self.name != "COMPLETED")


def batch_script(
    options: Mapping[str, str], variables: Mapping[str, str], command: Sequence[str]
) -> str:
    """Return a script for sbatch that runs `command`, and requeues its job if the run can resume.

    `options` are those of sbatch, by long name without dashes; an empty string means no value.
    """
    lines = ["#!/bin/bash", f"# by Headway {__version__}; sbatch can submit it again"]
    lines += [f"#SBATCH {_directive(name, value)}" for name, value in options.items()]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join([*lines, _BODY.format(command=shlex.join(command))])


def sbatch_words(options: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]


def _directive(name: str, value: str) -> str:
    """Format an option for a batch script, quoted as in C; `value` must not contain line breaks."""
    if all(char.isalnum() or char in "@%+=:,./_-" for char in value):
        return f"--{name}={value}" if value else f"--{name}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{escaped}"'


def submit(script: str, options: Sequence[str], environ: Mapping[str, str]) -> str:
    """Submit the text of a batch script; return the job's id, or "" if sbatch prints none.

    The options are passed on sbatch's command line, because SBATCH_* variables override options in
    the script. The job inherits `environ`. Raises LaunchError if sbatch refuses the job, and
    MachineError if SLURM is not installed here.
    """
    done = _run(["sbatch", "--parsable", *options], environ, script)
    if done.returncode != 0:
        raise LaunchError(
            f"SLURM refused the job: {_last_line(done.stderr)}",
            where="sbatch",
            fix="correct the option that the message names; `sinfo` lists the partitions",
            code=Code.JOB,
        )
    ids: list[str] = re.findall(r"^(\d+)(?:;\S+)?\s*$", done.stdout, re.MULTILINE)
    return ids[-1] if ids else ""  # JOB, or JOB;CLUSTER; a site's wrapper may print more lines


def is_job_id(word: str) -> bool:
    """Return whether a word is the id of a job or of an array task, such as 12 or 12_3."""
    return re.fullmatch(r"\d+(_\d+)?", word) is not None


def state_of(job: str) -> JobState:
    """Return a job's state from SLURM's controller or, for an older job, from its accounting.

    Raises LaunchError for an unknown job, and MachineError if SLURM is not installed here.
    """
    shown = _run(["scontrol", "show", "job", job])
    if shown.returncode == 0:
        return read_state(shown.stdout)
    with suppress(MachineError):  # sacct may be missing without accounting
        columns = ["sacct", "--noheader", "--allocations", "--parsable2", "--format"]
        kept = _run([*columns, "State,ExitCode", "--jobs", job])
        name, _, code = kept.stdout.partition("\n")[0].partition("|")
        if kept.returncode == 0 and code:
            exit_code, _, signal = code.partition(":")
            return JobState(name.split()[0], code=int(exit_code), signal=int(signal))
    raise LaunchError(
        f"cannot find job {job} in SLURM: {_last_line(shown.stderr)}",
        where="scontrol show job",
        fix="`squeue --me` lists your pending and running jobs",
        code=Code.JOB,
    )


def read_state(text: str) -> JobState:
    """Parse the output of `scontrol show job`, in which a line can end with arbitrary text."""
    code, _, signal = _value(r"^ +Requeue=.* ExitCode=(\d+:\d+)", text).partition(":")
    return JobState(
        _value(r"^ +JobState=(\w+)", text),
        _value(r"^ +JobState=\w+ Reason=(\S+)", text),
        _value(r"^ +StdOut=(.*)$", text).replace("%%", "%"),
        int(code or 0),
        int(signal or 0),
    )


def _value(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def follow(job: str, write: Callable[[bytes], object], log: Callable[[str], object]) -> JobState:
    """Copy a job's output until the job ends, even if it is requeued; return its last state.

    `write` is called with pieces of the output, and `log` with lines about the job. Raises
    LaunchError if SLURM does not know the job, or if the output cannot be read.
    """
    state = state_of(job)
    read_bytes, logged, pause_s = 0, "", _MIN_POLL_S
    times_missed = 0
    ended_before = False
    while True:
        read_bytes += copy_new(state.log, read_bytes, write)
        waits_for = state.reason if state.name == "PENDING" else ""
        if waits_for not in (logged, "None"):
            log(f"job {job} is pending: {waits_for}" if waits_for else f"job {job} has started")
            logged, pause_s = waits_for, _MIN_POLL_S
        if state.has_ended and ended_before:  # twice: a requeued job also ends briefly
            if not os.path.exists(state.log):
                log(f"the output of job {job} was not found: {_missing(state.log)}")
            return state
        times_missed += state.name == "RUNNING" and not os.path.exists(state.log)
        if times_missed == _NOTICE_AT:
            log(f"waiting for the output of job {job}: {_missing(state.log)}")
            times_missed += 1
        ended_before = state.has_ended
        asked_at = time.monotonic()
        while time.monotonic() < asked_at + (_MIN_POLL_S if ended_before else pause_s):
            time.sleep(_READ_EVERY_S)
            read_bytes += copy_new(state.log, read_bytes, write)
        pause_s = min(1.5 * pause_s, _MAX_POLL_S)
        state = state_of(job)


def _missing(log: str) -> str:
    return f"{log} does not exist" if log else "SLURM does not report the path"


def copy_new(path: str, offset: int, write: Callable[[bytes], object]) -> int:
    """Write the file's content from `offset` on, and return the number of bytes written."""
    copied = 0
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            while data := file.read(_CHUNK_BYTES):
                write(data)
                copied += len(data)
    except FileNotFoundError:  # the job has not started
        pass
    except OSError as error:
        what = f"cannot read the job's output: {error.strerror}"
        raise LaunchError(what, where=path, fix="check the path", code=Code.UNREADABLE) from None
    return copied


def _run(
    command: Sequence[str], environ: Mapping[str, str] | None = None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise MachineError(
            f"{command[0]} was not found: SLURM is not installed here",
            where="PATH",
            fix="submit from a login node of the cluster",
            code=Code.NOT_INSTALLED,
        )
    return subprocess.run(
        command,
        env=environ,
        input=text,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason reported"])[-1]
