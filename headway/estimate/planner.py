"""Asks the child about a script under every strategy, and judges what fits."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from headway.contract.choices import DDP, FSDP
from headway.contract.typed import decode, encode, kinds_of
from headway.errors import LaunchError
from headway.estimate.devices import Devices
from headway.settings.table import YES

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")
"""What a byte is for. Activations are made in the passes of modules; other tensors, such as
batches, outside of them."""


class Attempt(NamedTuple):
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


class Outcome(NamedTuple):
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


class Row(NamedTuple):
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
    Row("ddp"),
    Row("fsdp", sharded=True),
    Row("ddp+checkpointing", checkpointed=True),
    Row("fsdp+checkpointing", sharded=True, checkpointed=True),
)
"""The strategies, cheapest first. For one rank, `ddp` is plain training."""


def rows_for(world_size: int) -> tuple[Row, ...]:
    """Return the rows that apply to this number of ranks, cheapest first."""
    return tuple(row for row in ROWS if world_size > 1 or not row.sharded)


class Judged(NamedTuple):
    row: Row
    outcome: Outcome  # for the script's own arguments
    needed_bytes: int  # the peak with its margin
    fits: bool | None  # None where the script could not be followed


_SERVER = """
import sys
sys.path[:] = [*filter(None, sys.path), sys.argv[1]]
from headway.estimate.child.run import main
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

    def judge(self, rows: Sequence[Row], attempt: Attempt, devices: Devices) -> list[Judged]:
        found: list[Judged] = []
        for row in rows:
            asked = attempt._replace(sharded=row.sharded, checkpointed=row.checkpointed)
            outcome = self.follow(asked)
            found.append(Judged(row, outcome, *judged(outcome, devices)))
            if found[0].outcome.failed_at:
                break
        return found

    def follow(self, attempt: Attempt) -> Outcome:
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
        outcome: Outcome = decode(kinds_of(Outcome), line)
        return outcome


def judged(outcome: Outcome, devices: Devices) -> tuple[int, bool | None]:
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
