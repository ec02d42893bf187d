"""Asks the child about a script under every strategy, and judges what fits."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from headway.contract.lines import encode
from headway.contract.strategies import DDP, FSDP
from headway.errors import LaunchError
from headway.estimate.attempt import (
    FAKE,
    REAL,
    Attempt,
    Outcome,
    decode_outcome,
    scratch_prefix,
)
from headway.estimate.devices import Devices
from headway.settings.table import YES

MARGIN_BYTES = {"cuda": 5 * 2**28, "cpu": 2**29}
"""For what torch does not count: of a GPU its context, the workspaces of cuBLAS, cuDNN and NCCL; of
a CPU Python and its libraries."""
MARGIN_SHARE = 0.05  # of the peak: rounding and gaps of the allocator, workspaces of kernels

_PART_OF_MEMORY = 0.7  # of what is free here, for real steps


class Row(NamedTuple):
    """One way to train a script's model.

    Args:
        name: as it is printed, and for `--strategy`.
        sharded: parameters, gradients and optimizer are shared out among the ranks.
        checkpointed: activations of repeated blocks are recomputed.
        offloaded: what is shared out lies in the memory of the CPU.
    """

    name: str
    sharded: bool = False
    checkpointed: bool = False
    offloaded: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a launch with which a prepared model is trained so."""
        given = {
            "strategy": FSDP if self.sharded else DDP,
            "activation_checkpointing": YES if self.checkpointed else None,
            "cpu_offload": YES if self.offloaded else None,
        }
        return {name: value for name, value in given.items() if value is not None}


ROWS = (
    Row("ddp"),
    Row("fsdp", sharded=True),
    Row("ddp+checkpointing", checkpointed=True),
    Row("fsdp+checkpointing", sharded=True, checkpointed=True),
    Row("fsdp+checkpointing+offload", sharded=True, checkpointed=True, offloaded=True),
)
"""The strategies, cheapest first. For one rank, `ddp` is plain training."""

UNTESTED = "has not been tried on a GPU"  # of a row with offloading


def rows_for(world_size: int, kind: str) -> tuple[Row, ...]:
    """Return the rows that make sense for so many ranks on devices of this kind, cheapest first."""
    return tuple(
        row
        for row in ROWS
        if (world_size > 1 or not row.sharded) and (kind == "cuda" or not row.offloaded)
    )


def with_margin(peak_bytes: int, kind: str) -> int:
    """Return a peak with what torch does not count, for a device of this kind."""
    return peak_bytes + int(MARGIN_SHARE * peak_bytes) + MARGIN_BYTES[kind]


class BatchSizes(NamedTuple):
    """The script's own flag for its batch size, and the sizes to try, smallest first."""

    flag: str
    sizes: tuple[int, ...]

    def put_into(self, args: Sequence[str], size: int) -> tuple[str, ...]:
        """Return the script's arguments with this batch size."""
        kept = []
        words = iter(args)
        for word in words:
            if word == self.flag:
                next(words, None)
            elif not word.startswith(f"{self.flag}="):
                kept.append(word)
        if self.flag.startswith("-"):
            return (*kept, self.flag, str(size))
        return (*kept, f"{self.flag}={size}")


class Judged(NamedTuple):
    """What was found about one strategy.

    Attributes:
        row: the strategy.
        outcome: for the script's own arguments.
        needed_bytes: the peak with its margin.
        fits: whether a device has as much; None where activations were not counted, and the rest
            fits.
        largest_batch: of the sizes that were asked for, the largest that fits; None if none does.
    """

    row: Row
    outcome: Outcome
    needed_bytes: int
    fits: bool | None
    largest_batch: int | None = None


_SERVER = """
import sys
sys.path[:] = [one for one in sys.path if one]
sys.path += [one for one in sys.argv[1:] if one not in sys.path]
from headway.estimate.child.server import main
main()
"""
"""Runs the server without the working folder on its path: it imports before it confines itself."""


class Planner:
    """Makes attempts in a child that has imported torch. A context.

    Args:
        python: the interpreter, with its flags.
        environ: the script's environment.
    """

    def __init__(self, python: Sequence[str], environ: Mapping[str, str]) -> None:
        self._python = python
        self._environ = {**environ, **CONFINED}
        self._late_at = ""  # where the time limit has stopped the script

    def __enter__(self) -> Planner:
        self._server = subprocess.Popen(
            [*self._python, "-c", _SERVER, os.path.abspath(f"{__file__}/../../..")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environ,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(BrokenPipeError):  # of what a server that has ended did not read
            self._server.__exit__(kind, error, trace)  # closes its standard input, which ends it

    def judge(
        self, row: Row, attempt: Attempt, devices: Devices, batches: BatchSizes | None
    ) -> Judged:
        """Return what a strategy takes, and the largest batch size with which it fits."""
        asked = attempt._replace(
            sharded=row.sharded, checkpointed=row.checkpointed, offloaded=row.offloaded
        )
        outcome = self.climb_down(asked)
        needed, fits = judged(outcome, devices)
        largest = None if batches is None else self._largest(asked, devices, batches)
        return Judged(row, outcome, needed, fits, largest)

    def climb_down(self, attempt: Attempt) -> Outcome:
        """Return the outcome of the best rung that the script can be followed on."""
        fake = self._attempt(attempt)
        if fake.rung == FAKE or fake.is_late:
            return fake
        limit = int(_PART_OF_MEMORY * _free_bytes())
        if fake.peak_bytes >= limit:  # of the states, or 0 where not even they are known
            return fake
        real = self._attempt(attempt._replace(rung=REAL, memory_limit_bytes=limit))
        if real.rung == REAL:
            return real._replace(failed_at=fake.failed_at)
        return fake._replace(notes=(*fake.notes, f"real steps here failed, too: {real.failed_at}"))

    def _largest(self, attempt: Attempt, devices: Devices, batches: BatchSizes) -> int | None:
        """Return the largest size that fits, by halving: more samples never take less memory."""
        low, high = 0, len(batches.sizes)  # sizes below `low` fit, those from `high` on do not
        while low < high:
            middle = (low + high) // 2
            args = batches.put_into(attempt.args, batches.sizes[middle])
            if judged(self.climb_down(attempt._replace(args=args)), devices)[1]:
                low = middle + 1
            else:
                high = middle
        return batches.sizes[low - 1] if low else None

    def _attempt(self, attempt: Attempt) -> Outcome:
        if self._late_at:  # another strategy or batch size would be late as well
            return Outcome(failed_at=self._late_at, is_late=True)
        outcome = self._answer(attempt)
        self._late_at = outcome.failed_at if outcome.is_late else ""
        return outcome

    def _answer(self, attempt: Attempt) -> Outcome:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with suppress(BrokenPipeError):
            self._server.stdin.write(encode(attempt).decode())
            self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            code = self._server.wait()
            _remove_scratch(self._server.pid)
            raise LaunchError(
                f"the process that follows the script ended with exit code {code}",
                where=attempt.program,
                fix="see its own message above; report it if it is a traceback of headway's",
            )
        return decode_outcome(line)


def judged(outcome: Outcome, devices: Devices) -> tuple[int, bool | None]:
    """Return the bytes that are needed with the margin, and whether a device has them."""
    needed = with_margin(outcome.peak_bytes, devices.kind)
    if outcome.rung not in (FAKE, REAL):
        is_too_large = bool(outcome.rung) and needed > devices.bytes_per_rank
        return needed, False if is_too_large else None
    return needed, needed <= devices.bytes_per_rank


def _remove_scratch(server: int) -> None:
    """Remove what a server has left that was killed."""
    for one in Path(tempfile.gettempdir()).glob(f"{scratch_prefix(server)}*"):
        shutil.rmtree(one, ignore_errors=True)


def _free_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


CONFINED = {
    "CUDA_VISIBLE_DEVICES": "",
    **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # fake tensors are made in the script's own thread alone
    "WANDB_MODE": "disabled",
    "TQDM_DISABLE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Variables by which libraries are known to leave GPUs, the network, the disk and threads alone."""
