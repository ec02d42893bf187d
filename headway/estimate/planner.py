"""Reads which devices a script is to be trained on, asks the child about it under every strategy,
and judges what fits.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from headway.errors import ConfigError, LaunchError
from headway.ipc.choices import DDP, FSDP
from headway.ipc.typed import decode, encode, kinds_of
from headway.machine.facts import Machine
from headway.settings.table import YES

_UNITS = {"GB": 10**9, "GIB": 2**30}

_FORM = re.compile(
    r"(?:(?:(?P<machines>\d+)x)?(?P<count>\d+)x)?(?P<name>[a-z][a-z0-9]*)?"
    r"-?(?P<memory>\d+(?:\.\d+)?(?:GB|GiB))?",
    re.IGNORECASE,
)


class Devices(NamedTuple):
    """Equal devices on one machine or more."""

    kind: str  # cuda or cpu: those whose memory is estimated
    name: str  # as it is printed, and for a GPU what `torch.cuda.get_device_name()` gives
    memory_bytes: int  # of each; for CPUs of each machine
    per_machine: int = 1  # as many ranks
    machines: int = 1

    @property
    def world_size(self) -> int:
        return self.per_machine * self.machines

    @property
    def bytes_per_rank(self) -> int:
        """A device's memory, or a rank's share of its machine's."""
        return self.memory_bytes // (self.per_machine if self.kind == "cpu" else 1)

    def __str__(self) -> str:
        machines = f"{self.machines} x " if self.machines > 1 else ""
        size = self.memory_bytes / 2**30
        return f"{machines}{self.per_machine} x {self.name} ({size:.1f} GiB)"


def parse_devices(text: str, this_machine: Machine) -> Devices:
    """Return the devices that `--devices` means: 8xH100-80GB, 2x8xA100-40GB, 24GB, 4xcpu."""
    found = _FORM.fullmatch(text.strip().replace(" ", ""))
    if found is None or not (found["name"] or found["memory"]):
        raise ConfigError(
            f"devices are {text!r}, which is not of the form [MACHINESx][COUNTx]NAME[-MEMORY]",
            where="--devices",
            fix="pass such as --devices 8xH100-80GB, 2x8xA100-40GB, 24GB or 4xcpu",
        )
    count, machines = int(found["count"] or 1), int(found["machines"] or 1)
    if not count * machines:
        raise ConfigError(
            f"devices are {text!r}, which is none", where="--devices", fix="pass a count above 0"
        )
    memory = _bytes(found["memory"]) if found["memory"] else None
    name = found["name"] or "GPU"
    if name.lower() == "cpu":
        return Devices("cpu", "CPU", memory or _host_bytes(this_machine), count, machines)
    if memory is None:
        raise ConfigError(
            f"the memory of {name!r} is not given",
            where="--devices",
            fix=f"write it after the name: {name}-40GB",
        )
    return Devices("cuda", f"{name}-{found['memory']}", memory, count, machines)


def devices_of(machine: Machine) -> Devices:
    """Return the devices of a machine: its CUDA GPUs, the smallest memory of them, or its CPU."""
    if gpus := machine.gpus_of("cuda"):
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes or 0)
        if smallest.memory_bytes:
            return Devices("cuda", smallest.name, smallest.memory_bytes, len(gpus))
        why = smallest.unknown.get("memory_bytes", "not reported")
        what = f"the memory of {smallest.name} is not known: {why}"
        raise ConfigError(what, where="the machine", fix=f"pass --devices {len(gpus)}x24GB")
    return Devices("cpu", "CPU", _host_bytes(machine))


def _bytes(text: str) -> int:
    number = text.rstrip("GBgbiI")
    return int(float(number) * _UNITS[text[len(number) :].upper()])


def _host_bytes(machine: Machine) -> int:
    host = machine.host
    limits = (host.memory_bytes, host.memory_limit_bytes) if host else ()
    known = [limit for limit in limits if limit]
    if not known:
        raise ConfigError(
            "the memory of this machine is not known",
            where="the machine's snapshot",
            fix="say it with the devices: --devices cpu-64GB",
        )
    return min(known)


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")
"""What a byte is for. Activations are made in the passes of modules; other tensors, such as
batches, outside of them."""


class Trial(NamedTuple):
    program: str  # the script's path, or the name of a module
    args: tuple[str, ...]
    is_module: bool = False
    device: str = "cpu"  # or cuda: what the script is told that it has
    device_name: str = ""
    device_bytes: int = 0
    world_size: int = 1
    local_world_size: int = 1
    sharded: bool = False  # by `fully_shard`, over the ranks
    checkpointed: bool = False  # activations of repeated blocks are recomputed
    time_limit_s: float = 300.0


class TrialResult(NamedTuple):
    """What an attempt found, for one rank."""

    peak_bytes: int = 0  # at the highest point of the steps
    peak_at: str = ""  # when that was, and at which line
    categories: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    steps: int = 0  # optimizer steps that the script made
    seconds: float = 0.0  # from its first line to its last
    notes: tuple[str, ...] = ()  # what was skipped, bounded or refused, each with its line
    failed_at: str = ""  # the line that did not work, and why; nothing else is known then
    output: str = ""  # the last lines that the script printed


MARGIN_BYTES = {"cuda": 5 * 2**28, "cpu": 2**29}
"""For what torch does not count: of a GPU its context, the workspaces of cuBLAS, cuDNN and NCCL; of
a CPU Python and its libraries."""
MARGIN_SHARE = 0.05  # of the peak: rounding and gaps of the allocator, workspaces of kernels


class Variant(NamedTuple):
    name: str  # as it is printed, and for `--strategy`
    sharded: bool = False
    checkpointed: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """The launch settings that train a prepared model this way."""
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
"""The strategies, cheapest first. For one rank, `ddp` is plain training."""


def rows_for(world_size: int) -> tuple[Variant, ...]:
    """Return the rows that apply to this number of ranks, cheapest first."""
    return tuple(row for row in ROWS if world_size > 1 or not row.sharded)


class Judged(NamedTuple):
    row: Variant
    outcome: TrialResult  # for the script's own arguments
    needed_bytes: int  # the peak with its margin
    fits: bool | None  # None where the script could not be followed


_SERVER = """
import sys
sys.path[:] = [*filter(None, sys.path), sys.argv[1]]
from headway.estimate.child.trials import main
main()
"""
"""Runs the server without the working folder on its path: it imports before it confines itself."""


class Planner:
    """Makes attempts in a child that has imported torch. A context.

    `python` is the interpreter with its flags, and `environ` the environment of the script.
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
        with suppress(BrokenPipeError), self._server:  # of what it did not read, if it has ended
            pass  # its standard input is closed, which ends it

    def judge(self, rows: Sequence[Variant], attempt: Trial, devices: Devices) -> list[Judged]:
        found: list[Judged] = []
        for row in rows:
            asked = attempt._replace(sharded=row.sharded, checkpointed=row.checkpointed)
            outcome = self.follow(asked)
            found.append(Judged(row, outcome, *judged(outcome, devices)))
            if found[0].outcome.failed_at:
                break
        return found

    def follow(self, attempt: Trial) -> TrialResult:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with suppress(BrokenPipeError):
            self._server.stdin.write(encode(attempt).decode())
            self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            raise LaunchError(
                f"the process that follows the script ended with exit code {self._server.wait()}",
                where=attempt.program,
                fix="see its own message above; report it if it is a traceback of headway's",
            )
        outcome: TrialResult = decode(kinds_of(TrialResult), line)
        return outcome


def judged(outcome: TrialResult, devices: Devices) -> tuple[int, bool | None]:
    """Return the bytes needed, with the margin, and whether a device has them."""
    peak = outcome.peak_bytes
    needed = peak + int(MARGIN_SHARE * peak) + MARGIN_BYTES[devices.kind]
    return needed, None if outcome.failed_at else needed <= devices.bytes_per_rank


CONFINED = {
    "CUDA_VISIBLE_DEVICES": "",
    **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # fake tensors are made in the script's own thread alone
    "WANDB_MODE": "disabled",
    "TQDM_DISABLE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Variables by which libraries are known to leave GPUs, the network, the disk and threads alone."""
