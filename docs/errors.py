"""The page of error messages: the cause of each code, and a command that causes the error.

The commands run in this process, for recorded machines, in a temporary folder.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from docs.screens import make_stage
from headway.commands.launch import main as launch
from headway.errors import (
    CheckpointError,
    Code,
    ConfigError,
    HeadwayError,
    LaunchError,
    MachineError,
    Problem,
    UsageError,
)


class Example(NamedTuple):
    """The cause of a code, and a `headway launch` that fails with it.

    Args:
        cause: Markdown.
        flags: flags of `headway launch --dry-run`; None if no recorded machine causes the error.
        machine: the name of a recording in tests/machines.
        profile: the text of a headway.yaml.
        fix: the fix to print if `flags` is None.
    """

    cause: str
    flags: str | None = ""
    machine: str = "laptop_cpu"
    profile: str = ""
    fix: str = ""

    @property
    def arguments(self) -> list[str]:
        """The arguments of `headway launch`."""
        program = [] if "--no-python" in (self.flags or "") else ["train.py"]
        machine = ["--machine", f"{self.machine}.json"]
        return ["--dry-run", *machine, *shlex.split(self.flags or ""), *program]


PARTS: Mapping[str, Mapping[Code, Example]] = {
    "In one profile, variable or flag": {
        Code.UNKNOWN_SETTING: Example(
            "A profile has an unknown key, usually a typo.",
            profile="num_procesess: 2\n",
        ),
        Code.BAD_VALUE: Example("A value is invalid for its setting.", "--num-processes two"),
        Code.DUPLICATE_KEY: Example(
            "A profile sets a key twice. YAML does not define which value applies.",
            profile="device: cpu\nnum_processes: 2\ndevice: cuda\n",
        ),
        Code.NO_VALUE: Example("A key of a profile has no value.", profile="device:\n"),
        Code.BAD_FILE: Example(
            "A profile is not YAML, is not a flat map, or has a newer format.",
            profile="- device: cpu\n",
        ),
    },
    "Between settings": {
        Code.FP16_ON_CPU: Example(
            "fp16 needs loss scaling and kernels that torch has only for GPUs.",
            "--cpu --mixed-precision fp16",
        ),
        Code.DEVICES_WITHOUT_CUDA: Example(
            "`devices` selects GPUs by index, but the device has no index.", "--cpu --devices 2"
        ),
        Code.DEVICES_OR_PROCESSES: Example(
            "Each process uses one GPU, but the two settings imply different numbers of processes.",
            "--devices 0,1 --num-processes 1",
            "gpu_4",
        ),
        Code.SEVERAL_ON_MPS: Example(
            "A Mac has one GPU, and torch does not support communication between processes on it.",
            "--device mps --num-processes 2",
            "mac_m2",
        ),
        Code.MACHINE_RANK: Example(
            "Machines are numbered from 0, so the highest rank is one less than their number.",
            "--num-machines 2 --machine-rank 2 --main-address node0",
        ),
        Code.NO_MAIN_ADDRESS: Example(
            "The ranks of several machines connect to machine 0, whose address is unknown.",
            "--num-machines 2 --machine-rank 0",
        ),
        Code.VARIABLE_OF_LAUNCHER: Example(
            "`env` sets a variable that the launcher sets for each rank.",
            "--env RANK=1",
        ),
        Code.VARIABLE_OF_SETTING: Example(
            "`env` sets a variable that a setting of Headway overrides, or that only Accelerate "
            "reads.",
            "--env CUDA_VISIBLE_DEVICES=1",
        ),
        Code.THREADS_TWICE: Example(
            "The number of threads is set to two different values.",
            "--env OMP_NUM_THREADS=2 --threads-per-process 3",
        ),
        Code.MISSING_RANK: Example(
            "A setting names a rank that does not exist in this run.", "--ranks 0,70"
        ),
        Code.DEBUG_ON_MACHINES: Example(
            "`debug_rank` works on one machine only.",
            "--num-machines 2 --machine-rank 0 --main-address node0 --debug-rank 0",
        ),
        Code.NO_CLUSTER: Example(
            "`cluster` names a scheduler or mpirun, but it has not started this process.",
            "--cluster slurm",
        ),
        Code.CLUSTERS_DISAGREE: Example(
            "Two clusters report different machines: SLURM's step has 4, and `PET_NNODES` is 2.",
            None,
            fix="unset the wrong variable, or name the right cluster: `--cluster slurm`",
        ),
        Code.TASKS: Example(
            "SLURM or mpirun has started one process per rank, but the settings require one "
            "process per machine, or a different number of ranks.",
            None,
            fix="start one task per machine: `srun --ntasks-per-node=1 headway launch`",
        ),
        Code.NO_SHARD_SIZE: Example(
            "hsdp shards a model over the ranks of a machine, with a copy on each machine. On "
            "one machine, `shard_size` sets the number of ranks that share a copy.",
            "--cpu --num-processes 4 --strategy hsdp",
        ),
        Code.SHARD_SIZE: Example(
            "The ranks cannot be divided into groups of `shard_size`.",
            "--cpu --num-processes 4 --strategy hsdp --shard-size 3",
        ),
        Code.OFFLOAD_WITHOUT_GPU: Example(
            "`cpu_offload` moves tensors from a GPU to the memory of the CPU.",
            "--cpu --num-processes 2 --strategy fsdp --cpu-offload",
        ),
    },
    "Between settings and the machine": {
        Code.NO_MPS: Example(
            "MPS is requested, but torch cannot use it on this machine. The message states the "
            "cause.",
            "--device mps",
            "mac_rosetta",
        ),
        Code.NO_GPU: Example(
            "A GPU is requested, or its driver is loaded, but torch finds no GPU: it is missing or "
            "hidden by `CUDA_VISIBLE_DEVICES`, or its driver or torch's build does not support it.",
            "--device cuda",
            "driver_too_old",
        ),
        Code.NO_SUCH_GPU: Example(
            "`devices` names a GPU that does not exist or is not visible.", "--devices 9,", "gpu_4"
        ),
        Code.NO_USABLE_GPU: Example(
            "GPUs are visible, but the driver allows no process to use one: their compute mode is "
            "prohibited, or they are in MIG mode without slices.",
            None,
            fix="ask the machine's administrator, or pass `--device cpu`",
        ),
        Code.SEVERAL_MIG_SLICES: Example(
            "A process can use one MIG slice, and NCCL does not support several slices.",
            "--num-processes 2",
            "gpu_mig",
        ),
        Code.TOO_FEW_GPUS: Example(
            "There are more processes than usable GPUs.", "--num-processes 4", "gpu_2_one_busy"
        ),
        Code.NO_BF16: Example(
            "A selected GPU is older than Ampere (sm_80), the first architecture with bf16.",
            "--mixed-precision bf16",
            "gpu_mixed",
        ),
    },
    "Between settings and the program": {
        Code.SCRIPT_FROM_STREAM: Example(
            "Several ranks cannot read the script from one pipe.",
            "--cpu --num-processes 2 /dev/stdin",
        ),
        Code.LAUNCHER_IN_PROCESS: Example(
            "`--in-process` runs one process without a launcher, but a setting needs a launcher.",
            "--in-process --num-processes 2",
        ),
        Code.PROGRAM_IN_PROCESS: Example(
            "`--in-process` runs Python code, but the program is not Python.",
            "--in-process --no-python ls",
        ),
    },
}


def examples() -> dict[Code, Example]:
    """Return the examples of all parts."""
    return {code: example for part in PARTS.values() for code, example in part.items()}


@contextmanager
def stage() -> Iterator[None]:
    """Change to a folder that has only the recorded machines, without HEADWAY_* variables."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(("HEADWAY_", "PET_"))]:
            del os.environ[name]
        os.environ |= {"HOME": folder, "XDG_CONFIG_HOME": str(Path(folder, ".config"))}
        make_stage(Path(folder))
        try:
            os.chdir(folder)
            yield
        finally:
            os.chdir(here)


def problems_of(example: Example) -> tuple[Problem, ...]:
    """Return the problems that the example's command reports; call this within `stage`."""
    profile = Path("headway.yaml")
    if example.profile:
        profile.write_text(example.profile)
    try:
        with redirect_stderr(StringIO()):
            launch(example.arguments)
    except HeadwayError as error:
        return error.problems
    finally:
        profile.unlink(missing_ok=True)
    raise AssertionError(f"`headway launch {shlex.join(example.arguments)}` does not fail")


def page() -> str:
    """Return the page as Markdown."""
    kinds: Sequence[type[HeadwayError]] = (
        ConfigError,
        UsageError,
        MachineError,
        LaunchError,
        CheckpointError,
    )
    lines = [
        "# Error messages",
        "",
        "An error has three parts: the problem with its value, the origin of the value, and the "
        "fix. This page lists the errors that prevent a launch, by their code in the source.",
        "",
        "| kind | meaning | exit code |",
        "|---|---|---|",
        *(f"| `{kind.__name__}` | {_first_line(kind)} | {kind.exit_code} |" for kind in kinds),
        "",
    ]
    with stage():
        for title, part in PARTS.items():
            lines += [f"## {title}", ""]
            for code, example in part.items():
                lines += [f"### {code.name}", "", example.cause, "", *_shown(code, example), ""]
    return "\n".join(lines)


def _first_line(kind: type[HeadwayError]) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0]


def _shown(code: Code, example: Example) -> list[str]:
    if example.flags is None:
        return [f"**Fix:** {example.fix}."]
    lines = []
    if example.profile:
        lines += ['```yaml title="headway.yaml"', example.profile.rstrip(), "```", ""]
    (problem, *_) = [problem for problem in problems_of(example) if problem.code is code]
    command = f"$ headway launch {shlex.join(example.arguments)}"
    return [*lines, "```console", command, f"error: {problem}", "```"]
