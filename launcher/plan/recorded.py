"""What the record of a run says of its plan, with secrets masked.

On the path of a launch of one process, which writes its record before the script starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from headway._version import __version__
from headway.contract.run import CODE_VARIABLE
from headway.contract.secrets import masked, masked_command
from headway.history.code import copied_commit
from headway.history.store import Launch, script_path, variables_of
from headway.launcher.plan.plan import LaunchPlan
from headway.machine.facts import Machine
from headway.settings.table import TABLE

_MOST_CHARS = 2**16  # of a command line: what is longer is not recorded


def start_of(
    plan: LaunchPlan,
    machine: Machine,
    words: Sequence[str],
    environ: Mapping[str, str],
    began_at: float,
    pid: int,
) -> Launch:
    """Return what is recorded of a launch, with secrets masked.

    `words` follow `headway launch`; the processes inherit `environ`, before the plan's changes;
    `pid` is that of the launcher, or of the process that it becomes.
    """
    shown = without_secrets(plan)
    settings, program = shown.settings, shown.program
    script = script_path(program.kind, program.name)
    name, arguments = program.name, _short(program.args)
    code = environ.get(CODE_VARIABLE, "")
    if code and (commit := copied_commit(code)) is not None:
        here = partial(_as_typed, code, commit.root)
        name, arguments, words = here(name), tuple(map(here, arguments)), [*map(here, words)]
        script = script.replace(code, commit.root)
    return Launch(
        began_at=began_at,
        pid=pid,
        host=os.uname().nodename,
        folder=os.getcwd(),
        kind=program.kind,
        program=name,
        script=script,
        arguments=arguments,
        command=_short(masked_command(words)),
        python=tuple(plan.python),
        settings={name: text_of(settings.values[name].value) for name in TABLE},
        origins={
            name: str(settings.origin(name)) for name in TABLE if settings.origin(name).is_user_set
        },
        environment={
            name: change.value or ""
            for name, change in shown.environment.items()
            if name in settings.env  # all others follow from settings and machine
        },
        machine=_facts(machine),
        variables=variables_of(environ),
        num_processes=settings.num_processes if plan.task is None else plan.task.world_size,
        num_machines=settings.num_machines,
        supervised=plan.supervised,
        job=plan.job,
        snapshot=code,
        is_rank=plan.is_rank,
    )


def without_secrets(plan: LaunchPlan) -> LaunchPlan:
    program = plan.program._replace(args=tuple(masked_command(plan.program.args)))
    environment = {
        name: change if change.value is None else change._replace(value=masked(name, change.value))
        for name, change in plan.environment.items()
    }
    settings = plan.settings.without_secrets()
    return plan._replace(program=program, environment=environment, settings=settings)


def text_of(value: object) -> str:
    if value is None or value == {}:
        return "-"
    if isinstance(value, dict):
        return " ".join(f"{name}={text}" for name, text in value.items())
    if type(value) is tuple:  # ranks
        from headway.contract.notes import ranges

        return ranges(value)
    return str(value)


def _as_typed(code: str, root: str, word: str) -> str:
    """Return a word of a command line as it was before a copy of the code was made."""
    before, found, name = word.partition(code + os.sep)
    path = os.path.join(root, name)
    near = os.path.relpath(path)
    return f"{before}{path if near.startswith(os.pardir) else near}" if found else word


def _short(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(words) if sum(map(len, words)) <= _MOST_CHARS else ()


def _facts(machine: Machine) -> dict[str, str]:
    return {
        "headway": __version__,
        "python": sys.version.split()[0],
        "torch": machine.torch.version if machine.torch is not None else "",
        "host": os.uname().nodename,
        "system": f"{machine.system} {os.uname().release}",
        "architecture": machine.architecture,
        "cores": str(machine.cores),
        "gpus": ", ".join(gpu.name for gpu in machine.gpus) or "none",
        "driver": machine.driver or "none",
        "gpu_mask": machine.mask or "",
    }
