"""The variables by which launchers and schedulers number processes or machines: "you are n of m".

`headway launch` joins what a row counts, or refuses it (`launcher/clusters/`); an Accelerator
refuses it in a process without RANK.
"""

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from headway.ipc.run_contract import VARIABLE as RUN_VARIABLE

Environ = Mapping[str, str]

ALONE_VARIABLE, ALONE = "HEADWAY_CLUSTER", "none"
"""They say that a process is no part of what the variables of others count."""

PROCESS, MACHINE = "process", "machine"
STEP_VARIABLE, _STEP_SIZE = "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"
_TERMINAL = "SLURM_PTY_PORT"
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM_MAX_NORMAL_STEP_ID: then batch scripts and shells


def is_numbered_step(environ: Environ) -> bool:
    """Return whether this process is in a step that srun has made, not in a script's or shell's."""
    step = environ.get(STEP_VARIABLE, "")
    return step.isdecimal() and step.isascii() and int(step) < _FIRST_SPECIAL_STEP


def is_task(environ: Environ) -> bool:
    """Return whether srun has started this process as one of a step's tasks.

    Of a step in a pseudo-terminal, only one task has it: that is a shell to start others from.
    """
    return is_numbered_step(environ) and _TERMINAL not in environ


def _in_file(path: str) -> str:
    """Return the text of a scheduler's file; empty if it is not on this machine."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return ""


UNKNOWN = -1  # what is no number


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() else UNKNOWN if text else 0


class Numbering(NamedTuple):
    """What one launcher or scheduler sets."""

    by: str  # it, for messages
    size: str  # the variable that holds how many there are
    rank: str  # the variable that holds which of them this is; empty: this is the only one
    what: str = PROCESS  # is counted
    is_joined: bool = True  # by `headway launch`
    read: Callable[[str], int] = _number  # returns the number in `size`
    applies: Callable[[Environ], bool] = lambda _: True
    hosts: Callable[[str], str] | None = None  # returns the names of hosts, if `size` has these

    def count(self, environ: Environ) -> int:
        """Return how many there are, or UNKNOWN; 0 if unset. Raises OSError for a file of hosts."""
        if self.size not in environ or not self.applies(environ):
            return 0
        return self.read(environ[self.size]) if self.hosts is None else len(self.names(environ))

    def names(self, environ: Environ) -> list[str]:
        """Return the names of the hosts, each once; none where only their number is set."""
        return list(dict.fromkeys(self.hosts(environ[self.size]).split())) if self.hosts else []


NUMBERINGS: Mapping[str, Numbering] = {
    "torchrun": Numbering(
        *("torchrun's configuration", "PET_NNODES", "PET_NODE_RANK", MACHINE),
        read=lambda text: _number(text.rpartition(":")[2].strip()),
    ),
    "mpi": Numbering("mpirun of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mvapich": Numbering(
        "mpirun of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", is_joined=False
    ),
    "pmi": Numbering(
        *("mpiexec of Intel MPI, MPICH or Cray PALS", "PMI_SIZE", "PMI_RANK"),
        is_joined=False,
        applies=lambda environ: environ["PMI_SIZE"] != environ.get(_STEP_SIZE),  # else srun's
    ),
    "jsrun": Numbering("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", is_joined=False),
    "flux": Numbering("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", is_joined=False),
    "slurm": Numbering("srun", _STEP_SIZE, "SLURM_PROCID", applies=is_task),
    "skypilot": Numbering("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", MACHINE),
    "ranked": Numbering(
        *("a launcher of ranks", "WORLD_SIZE", "RANK"),
        # torchrun, and the hooks of containers, set LOCAL_RANK
        applies=lambda environ: (
            {"RANK", "MASTER_ADDR"} <= environ.keys() and "LOCAL_RANK" not in environ
        ),
    ),
    "kubernetes": Numbering("an indexed Job", "", "JOB_COMPLETION_INDEX", MACHINE),
    "aws_batch": Numbering(
        *("AWS Batch", "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX", MACHINE),
        is_joined=False,
    ),
    "sagemaker": Numbering(
        *("SageMaker", "SM_HOSTS", "SM_CURRENT_HOST", MACHINE),
        is_joined=False,
        read=lambda text: text.count(",") + 1,  # a JSON list of names
    ),
    "pbs": Numbering("PBS", "PBS_NODEFILE", "", MACHINE, False, hosts=_in_file),
    "lsf": Numbering("LSF", "LSB_DJOB_HOSTFILE", "", MACHINE, False, hosts=_in_file),
    "lsf_list": Numbering("LSF", "LSB_HOSTS", "", MACHINE, False, hosts=str),
}
"""The first row that counts several holds. The names of those that are joined are clusters'."""


def unknown_launcher(environ: Environ = os.environ) -> Numbering | None:
    """Return what counts this process, which no launcher has given a rank, as one of several."""
    if RUN_VARIABLE in environ or environ.get(ALONE_VARIABLE, "").strip().lower() == ALONE:
        return None
    started = [row for row in NUMBERINGS.values() if row.rank]
    return next((row for row in started if row.count(environ) not in (0, 1)), None)
