"""Memory planning: parse the target devices, run a trial per strategy, and check what fits."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from headway.errors import Code, ConfigError, LaunchError
from headway.ipc.choices import DDP, FSDP
from headway.ipc.typed import decode, encode
from headway.machine.facts import Machine
from headway.settings.table import YES

_UNITS = {"GB": 10**9, "GIB": 2**30}

_FORM = re.compile(
    r"(?:(?:(?P<machines>\d+)x)?(?P<count>\d+)x)?(?P<name>[a-z][a-z0-9]*)?"
    r"-?(?P<memory>(?P<size>\d+(?:\.\d+)?)(?P<unit>GB|GiB))?",
    re.IGNORECASE,
)


class Devices(NamedTuple):
    """Identical devices on one or more machines."""

    kind: str  # cuda or cpu
    name: str  # for display and, for a GPU, `torch.cuda.get_device_name()`
    memory_bytes: int  # per device; for CPUs per machine
    per_machine: int = 1  # devices and ranks
    machines: int = 1

    @property
    def world_size(self) -> int:
        return self.per_machine * self.machines

    @property
    def bytes_per_rank(self) -> int:
        """The device's memory, or the rank's share of its machine's memory."""
        return self.memory_bytes // (self.per_machine if self.kind == "cpu" else 1)

    def __str__(self) -> str:
        machines = f"{self.machines} x " if self.machines > 1 else ""
        return f"{machines}{self.per_machine} x {self.name} ({self.memory_bytes / 2**30:.1f} GiB)"


def parse_devices(text: str, this_machine: Machine) -> Devices:
    """Parse `--devices`: 8xH100-80GB, 2x8xA100-40GB, 24GB, 4xcpu."""
    found = _FORM.fullmatch(text.strip().replace(" ", ""))
    if found is None or not (found["name"] or found["memory"]):
        raise ConfigError(
            f"invalid value {text!r} for --devices: expected [MACHINESx][COUNTx]NAME[-MEMORY]",
            where="--devices",
            fix="pass devices such as 8xH100-80GB, 2x8xA100-40GB, 24GB or 4xcpu",
            code=Code.BAD_VALUE,
        )
    count, machines = int(found["count"] or 1), int(found["machines"] or 1)
    if not count * machines:
        raise ConfigError(
            f"invalid value {text!r} for --devices: a count is 0",
            where="--devices",
            fix="pass counts of at least 1",
            code=Code.BAD_VALUE,
        )
    memory = int(float(found["size"]) * _UNITS[found["unit"].upper()]) if found["memory"] else None
    name = found["name"] or "GPU"
    if name.lower() == "cpu":
        return Devices("cpu", "CPU", memory or _host_bytes(this_machine), count, machines)
    if memory is None:
        raise ConfigError(
            f"no memory size is given for {name!r}",
            where="--devices",
            fix=f"append the memory of one device to the name, as in H100-80GB: {name}-<memory>GB",
            code=Code.NO_ESTIMATE,
        )
    return Devices("cuda", f"{name}-{found['memory']}", memory, count, machines)


def devices_of(machine: Machine) -> Devices:
    """Return a machine's CUDA GPUs with the memory of the smallest, or its CPU without GPUs."""
    if gpus := machine.gpus_of("cuda"):
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes or 0)
        if smallest.memory_bytes:
            return Devices("cuda", smallest.name, smallest.memory_bytes, len(gpus))
        why = smallest.unknown.get("memory_bytes", "not reported")
        what = f"the memory of {smallest.name} is unknown: {why}"
        raise ConfigError(
            what, where="the machine", fix=f"pass --devices {len(gpus)}x24GB", code=Code.NO_ESTIMATE
        )
    return Devices("cpu", "CPU", _host_bytes(machine))


def _host_bytes(machine: Machine) -> int:
    host = machine.host
    limits = (host.memory_bytes, host.memory_limit_bytes) if host else ()
    known = [limit for limit in limits if limit]
    if not known:
        raise ConfigError(
            "the memory of this machine is unknown",
            where="the machine's snapshot",
            fix="add the memory size to the devices: --devices cpu-64GB",
            code=Code.NO_ESTIMATE,
        )
    return min(known)


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")
"""Categories of memory. Activations are created during forward and backward passes; the category
"other" is for tensors that are created outside them, such as batches."""


class Trial(NamedTuple):
    program: str  # path of a script or name of a module
    args: tuple[str, ...]
    is_module: bool = False
    device: str = "cpu"  # or cuda: the device reported to the script
    device_name: str = ""
    device_bytes: int = 0
    world_size: int = 1
    local_world_size: int = 1
    sharded: bool = False  # shard the model with `fully_shard`
    checkpointed: bool = False  # recompute activations of repeated blocks
    time_limit_s: float = 300.0


class TrialResult(NamedTuple):
    """The result of a trial, for one rank."""

    peak_bytes: int = 0
    peak_at: str = ""  # time and line of the peak
    categories: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    steps: int = 0  # completed optimizer steps
    seconds: float = 0.0  # duration of the script
    notes: tuple[str, ...] = ()  # skipped, assumed and denied calls, each with its line
    failed_at: str = ""  # the failing line and the reason; the other fields are unset then
    output: str = ""  # end of the script's output


MARGIN_BYTES = {"cuda": 5 * 2**28, "cpu": 2**29}
"""Memory that torch does not count: a GPU's context and the workspaces of cuBLAS, cuDNN and
NCCL; on a CPU, Python and its libraries."""
MARGIN_SHARE = 0.05  # of the peak: allocator rounding and fragmentation, kernel workspaces


class Variant(NamedTuple):
    name: str  # for display and `--strategy`
    sharded: bool = False
    checkpointed: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """The launch settings of this variant."""
        given = {"strategy": FSDP if self.sharded else DDP}
        if self.checkpointed:
            given["activation_checkpointing"] = YES
        return given


ROWS = (
    Variant("ddp"),
    Variant("fsdp", sharded=True),
    Variant("ddp+checkpointing", checkpointed=True),
    Variant("fsdp+checkpointing", sharded=True, checkpointed=True),
)
"""The variants, cheapest first. With one rank, `ddp` is plain training."""


def rows_for(world_size: int) -> tuple[Variant, ...]:
    """Return the variants that apply to this number of ranks, cheapest first."""
    return tuple(row for row in ROWS if world_size > 1 or not row.sharded)


class RowEstimate(NamedTuple):
    row: Variant
    result: TrialResult  # of the script with its original arguments
    needed_bytes: int  # the peak plus the margin
    fits: bool | None  # None if the script failed


_SERVER = """
import sys
sys.path[:] = [*filter(None, sys.path), sys.argv[1]]
from headway.estimate.child.trials import main
main()
"""
"""Runs the server without the working folder in sys.path, because imports precede confinement."""


class Planner:
    """A context manager that runs trials in a child process that has imported torch.

    `python` is the interpreter with its flags, and `environ` the script's environment.
    """

    def __init__(self, python: Sequence[str], environ: Mapping[str, str]) -> None:
        self._python = python
        self._environ = {**environ, **CONFINED}

    def __enter__(self) -> Planner:
        self._server = subprocess.Popen(
            [*self._python, "-c", _SERVER, os.path.abspath(f"{__file__}/../../..")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environ,
        )
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError), self._server:  # unread input, if the server exited
            pass  # closes its standard input, which terminates it

    def run_all(self, rows: Sequence[Variant], trial: Trial, devices: Devices) -> list[RowEstimate]:
        found: list[RowEstimate] = []
        for row in rows:
            result = self.run(trial._replace(sharded=row.sharded, checkpointed=row.checkpointed))
            found.append(RowEstimate(row, result, *required_memory(result, devices)))
            if found[0].result.failed_at:
                break
        return found

    def run(self, trial: Trial) -> TrialResult:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with suppress(BrokenPipeError):
            self._server.stdin.write(encode(trial).decode())
            self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            raise LaunchError(
                f"the estimation process exited with code {self._server.wait()}",
                where=trial.program,
                fix="see its output above; report a traceback from headway as a bug",
                code=Code.NO_ESTIMATE,
            )
        result: TrialResult = decode(TrialResult, line)
        return result


def required_memory(result: TrialResult, devices: Devices) -> tuple[int, bool | None]:
    """Return the required bytes, including the margin, and whether they fit."""
    peak = result.peak_bytes
    needed = peak + int(MARGIN_SHARE * peak) + MARGIN_BYTES[devices.kind]
    return needed, None if result.failed_at else needed <= devices.bytes_per_rank


CONFINED = {
    "CUDA_VISIBLE_DEVICES": "",
    **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # fake tensors are created only in the script's thread
    "WANDB_MODE": "disabled",
    "TQDM_DISABLE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Variables that keep libraries from using GPUs, the network, the disk or threads."""
