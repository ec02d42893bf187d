"""The entry of a launch in the run record."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from headway._version import __version__
from headway.history.store import Launch, copied_commit, variables_of
from headway.ipc.run_contract import CODE_VARIABLE
from headway.ipc.secrets import masked_command
from headway.launcher.plan.plan import LaunchPlan, text_of, without_secrets
from headway.machine.facts import Machine
from headway.settings.table import TABLE


def launch_record(plan: LaunchPlan, words: Sequence[str], pid: int) -> Launch:
    """Return the launch's entry in the run record, with secrets masked.

    `words` are the arguments of `headway launch`; `pid` is the launcher's or script's process id.
    """
    shown = without_secrets(plan)
    settings, program = shown.settings, shown.program
    name, arguments, script = program.name, program.args, program.path
    code = plan.inherited.get(CODE_VARIABLE, "")
    if code and (commit := copied_commit(code)) is not None:
        here = partial(_original_path, code, commit.root)
        name, arguments, words = here(name), tuple(map(here, arguments)), [*map(here, words)]
        script = script.replace(code, commit.root)
    return Launch(
        began_at=plan.began_at,
        pid=pid,
        host=os.uname().nodename,
        folder=os.getcwd(),
        program=name,
        script=script,
        arguments=arguments,
        command=tuple(masked_command(words)),
        python=tuple(plan.python),
        settings={name: text_of(settings.values[name].value) for name in TABLE},
        origins={
            name: str(settings.origin(name)) for name in TABLE if settings.origin(name).is_user_set
        },
        environment={
            name: change.value or ""
            for name, change in shown.environment.items()
            if name in settings.env  # all others follow from the settings and the machine
        },
        machine=_facts(plan.machine),
        variables=variables_of(plan.inherited),
        num_processes=settings.num_processes if plan.task is None else plan.task.world_size,
        num_machines=settings.num_machines,
        supervised=plan.supervised,
        job=plan.job,
        snapshot=code,
        is_rank=plan.is_rank,
    )


def _original_path(code: str, root: str, word: str) -> str:
    """Return a command-line word with the path of the code's copy replaced by the original path."""
    before, found, name = word.partition(code + os.sep)
    path = os.path.join(root, name)
    near = os.path.relpath(path)
    return f"{before}{path if near.startswith(os.pardir) else near}" if found else word


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
