"""Variables that launchers and schedulers set to number their processes or machines.

`headway launch` adopts the numbering or raises an error (`launcher/clusters/`). If a process
is numbered but has no RANK, its Accelerator raises an error.
"""

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from headway.ipc.run_contract import VARIABLE as RUN_VARIABLE

Environ = Mapping[str, str]

ALONE_VARIABLE, ALONE = "HEADWAY_CLUSTER", "none"
"""The variable and value that make a process ignore other launchers' numbering."""

PROCESS, MACHINE = "process", "machine"
STEP_VARIABLE, _STEP_SIZE = "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"
_TERMINAL = "SLURM_PTY_PORT"
_ELASTIC_RUN = "TORCHELASTIC_RUN_ID"
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # batch scripts and shells have ids from here on


def is_numbered_step(environ: Environ) -> bool:
    """Return whether this process is in a step created by srun, not in a batch script or shell."""
    step = environ.get(STEP_VARIABLE, "")
    return step.isdecimal() and step.isascii() and int(step) < _FIRST_SPECIAL_STEP


def is_task(environ: Environ) -> bool:
    """Return whether srun started this process as a task of a step.

    Return False in a step with a pseudo-terminal, because the step's task is an interactive shell.
    """
    return is_numbered_step(environ) and _TERMINAL not in environ


def _read_first_words(path: str) -> str:
    """Return the host names of a file that continues each of its lines with other facts."""
    return " ".join(line.split()[0] for line in _read_hosts(path).splitlines() if line.split())


def _read_hosts(path: str) -> str:
    """Return the text of a scheduler's host file, or an empty string if there is no file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return ""


UNKNOWN = -1  # the value is not a number


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() else UNKNOWN if text else 0


class Numbering(NamedTuple):
    """The variables that a launcher or scheduler sets to number its processes or machines."""

    source: str  # name of the launcher or scheduler, for messages
    size: str  # the variable with the number of processes or machines
    rank: str  # the variable with the index of this process or machine; empty if there is none
    unit: str = PROCESS  # the numbered unit
    read: Callable[[str], int] = _number  # parses the value of `size`
    applies: Callable[[Environ], bool] = lambda _: True
    hosts: Callable[[str], str] | None = None  # returns host names from the value of `size`

    def count(self, environ: Environ) -> int:
        """Return the number of processes or machines; UNKNOWN if it is invalid, 0 if it is unset.

        Raises OSError if the host file cannot be read.
        """
        if self.size not in environ or not self.applies(environ):
            return 0
        return self.read(environ[self.size]) if self.hosts is None else len(self.hostnames(environ))

    def hostnames(self, environ: Environ) -> list[str]:
        """Return the distinct host names, or an empty list if only the number of hosts is set."""
        return list(dict.fromkeys(self.hosts(environ[self.size]).split())) if self.hosts else []


NUMBERINGS: Mapping[str, Numbering] = {
    "torchrun": Numbering(
        *("torchrun's configuration", "PET_NNODES", "PET_NODE_RANK", MACHINE),
        read=lambda text: _number(text.rpartition(":")[2].strip()),
    ),
    "mpi": Numbering("mpirun of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mvapich": Numbering("mpirun of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    "pmi": Numbering(
        *("mpiexec of Intel MPI, MPICH or Cray PALS", "PMI_SIZE", "PMI_RANK"),
        applies=lambda environ: environ["PMI_SIZE"] != environ.get(_STEP_SIZE),  # equal under srun
    ),
    "jsrun": Numbering("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    "flux": Numbering("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    "submitit": Numbering("submitit", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_GLOBALID"),
    "slurm": Numbering("srun", _STEP_SIZE, "SLURM_PROCID", applies=is_task),
    "skypilot": Numbering("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", MACHINE),
    "ranked": Numbering(
        *("a launcher of ranks", "WORLD_SIZE", "RANK"),
        # torchrun and container hooks set LOCAL_RANK; AzureML also sets NODE_RANK
        applies=lambda env: (
            {"RANK", "MASTER_ADDR"} <= env.keys()
            and ("LOCAL_RANK" not in env or ("NODE_RANK" in env and _ELASTIC_RUN not in env))
        ),
    ),
    "kubernetes": Numbering("an indexed Job", "", "JOB_COMPLETION_INDEX", MACHINE),
    "aws_batch": Numbering(
        "AWS Batch", "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX", MACHINE
    ),
    "sagemaker": Numbering(
        *("SageMaker", "SM_HOSTS", "SM_CURRENT_HOST", MACHINE),
        read=lambda text: text.count(",") + 1,  # `text` is a JSON list of names
    ),
    "pbs": Numbering("PBS", "PBS_NODEFILE", "", MACHINE, hosts=_read_hosts),
    "lsf": Numbering("LSF", "LSB_DJOB_HOSTFILE", "", MACHINE, hosts=_read_hosts),
    "lsf_list": Numbering("LSF", "LSB_HOSTS", "", MACHINE, hosts=str),
    "lsf_counts": Numbering(  # LSF omits LSB_HOSTS if it is too long
        *("LSF", "LSB_MCPU_HOSTS", "", MACHINE), hosts=lambda text: " ".join(text.split()[::2])
    ),
    "grid_engine": Numbering("Grid Engine", "PE_HOSTFILE", "", MACHINE, hosts=_read_first_words),
    "oar": Numbering("OAR", "OAR_NODEFILE", "", MACHINE, hosts=_read_hosts),
    "cobalt": Numbering("Cobalt", "COBALT_NODEFILE", "", MACHINE, hosts=_read_hosts),
    "htcondor": Numbering("HTCondor", "_CONDOR_NPROCS", "_CONDOR_PROCNO", MACHINE),
    "google_batch": Numbering("Google Batch", "BATCH_HOSTS_FILE", "", MACHINE, hosts=_read_hosts),
    "azure_batch": Numbering(
        *("Azure Batch", "AZ_BATCH_NODE_LIST", "", MACHINE),
        hosts=lambda text: text.replace(";", " "),
    ),
    "volcano": Numbering("Volcano", "VC_WORKER_NUM", "VC_TASK_INDEX", MACHINE),
    "leader_worker_set": Numbering(
        "a LeaderWorkerSet", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", MACHINE
    ),
    "lightning": Numbering(
        *("a launcher of machines", "NODE_RANK", "NODE_RANK", MACHINE),
        read=lambda _: 2,  # several; no variable contains the number
        applies=lambda environ: (
            "RANK" not in environ
            and environ.get("WORLD_SIZE", environ.get("MASTER_ADDR", "1")) != "1"
        ),
    ),
}
"""Numberings by name; the first one that counts several processes or machines applies."""


def unknown_launcher(environ: Environ = os.environ) -> Numbering | None:
    """Return the launcher that started this process as one of several, without setting RANK.

    Return None if there is no such launcher.
    """
    if RUN_VARIABLE in environ or environ.get(ALONE_VARIABLE, "").strip().lower() == ALONE:
        return None
    started = [row for row in NUMBERINGS.values() if row.rank]
    return next((row for row in started if row.count(environ) not in (0, 1)), None)
