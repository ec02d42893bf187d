"""The batch script of a SLURM job: what is asked for, and the launch that it runs. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headway._version import __version__

_BODY = """\
# an array's last job has the number of the whole array
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
# until when ranks may save; older releases of SLURM do not say it, and some jobs have no end
end=$(squeue --noheader --jobs "$job" --format %e)
export SLURM_JOB_END_TIME="${{SLURM_JOB_END_TIME:-$(date --date "$end" +%s 2>/dev/null)}}"
trap : TERM  # the step of the job gets its own: it saves, and ends with exit code 75
{command}
code=$?
again=$code
if [ "$code" -eq 143 ]; then  # preempted before there was anything to save, it has to start anew
    case $(squeue --noheader --jobs "$job" --Format preempttime) in [0-9]*) again=75 ;; esac
fi
# to be run again, unless the job is being cancelled: then it is not RUNNING any more
if [ "$again" -eq 75 ] && [ "$(squeue --noheader --jobs "$job" --format %T)" = RUNNING ]; then
    scontrol requeue "$job"
fi
exit "$code"
"""


class Job(NamedTuple):
    """A job for SLURM.

    Args:
        options: of sbatch, by their long names without dashes; "" for those without a value.
        variables: of the environment that the script sets.
        command: the launch, with its arguments.
    """

    options: Mapping[str, str]
    variables: Mapping[str, str]
    command: Sequence[str]


def batch_script(job: Job) -> str:
    """Return the text of a script for sbatch, which has the job run again where it may go on."""
    lines = ["#!/bin/bash", f"# by Headway {__version__}; sbatch can submit it again"]
    lines += [f"#SBATCH {_directive(name, value)}" for name, value in job.options.items()]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    return "\n".join([*lines, _BODY.format(command=shlex.join(job.command))])


def sbatch_words(options: Mapping[str, str]) -> list[str]:
    """Return the options as words of a command line."""
    return [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]


def _directive(name: str, value: str) -> str:
    """Return an option as sbatch reads it from a script: quotes as in C, no line breaks."""
    if not value:
        return f"--{name}"
    if all(char.isalnum() or char in "@%+=:,./_-" for char in value):
        return f"--{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{escaped}"'
