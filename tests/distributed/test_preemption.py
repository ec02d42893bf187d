"""A job that is stopped or killed at any time goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.families import survivors
from tests.distributed.launching import start

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are started for Linux"),
]

WORKER = str(Path(__file__).with_name("preempted_worker.py"))
NUM_SAMPLES, EPOCHS, STEPS = 52, 4, 28
LIMIT_S = 120
Outcome = tuple[int, str]


class Job:
    """A training in a folder of its own, which is launched again and again."""

    def __init__(self, folder: Path, *flags: str) -> None:
        folder.mkdir(parents=True)
        self.folder, self._flags = folder, flags

    def start(self, *words: str, flags: Sequence[str] = ()) -> subprocess.Popen[str]:
        for stale in self.folder.glob("pid-*"):
            stale.unlink()
        return start("-q", "--cpu", *self._flags, *flags, WORKER, str(self.folder), *words)

    def ledger(self, rank: int = 0) -> list[Any]:
        path = self.folder / f"ledger-{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(one) for one in lines if one.endswith("\n")]

    def wait(self, process: subprocess.Popen[str], is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_there():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def wait_for_batches(self, process: subprocess.Popen[str], count: int) -> None:
        self.wait(process, lambda: len(self.ledger()) >= count)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    @property
    def done(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "done.json").read_text())
        return found


def ended(process: subprocess.Popen[str]) -> Outcome:
    out, errors = process.communicate(timeout=LIMIT_S)
    assert not survivors(5)
    return process.returncode, out + errors


@cache
def undisturbed(factory: pytest.TempPathFactory, *flags: str) -> str:
    job = Job(factory.mktemp("undisturbed") / "job", *flags)
    code, text = ended(job.start("--nap", "0"))
    assert code == 0, text
    return str(job.done["weights"])


def require_exact(job: Job, ranks: int) -> None:
    """Require that each sample and each step was there once, in order."""
    ledgers = [job.ledger(rank) for rank in range(ranks)]
    seen = Counter((epoch, one) for ledger in ledgers for epoch, _, batch in ledger for one in batch)
    assert seen == Counter((epoch, one) for epoch in range(EPOCHS) for one in range(NUM_SAMPLES))
    for ledger in ledgers:
        steps = [step for _, step, _ in ledger]
        assert steps == sorted(steps)
        assert {*steps} == {*range(STEPS + 1)}
    assert job.done["steps"] == STEPS


TWO = ("--num-processes", "2")


def stop(job: Job, process: subprocess.Popen[str], how: str) -> None:
    if how == "one rank":
        os.kill(job.pid(1), signal.SIGTERM)
    else:
        process.send_signal(signal.Signals[how])


def test_two_ranks_that_are_stopped_in_every_way_repeat_nothing_and_miss_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job, dice = Job(tmp_path / "job", *TWO), random.Random()
    for how in ("SIGTERM", "SIGUSR1", "one rank", "SIGINT", "time limit"):
        before = len(job.ledger())
        if how == "time limit":
            process = job.start(flags=("--time-limit", "1s"))
        else:
            process = job.start()
            job.wait_for_batches(process, before + dice.randint(1, 8))
            stop(job, process, how)
        code, text = ended(process)
        assert code == (130 if how == "SIGINT" else 75), (how, text)
        assert text.count("stopped by") == 1, text
        assert "Traceback" not in text
        assert len(job.ledger(0)) == len(job.ledger(1)) > before
    code, text = ended(job.start("--nap", "0"))
    assert code == 0, text
    require_exact(job, 2)
    assert job.done["weights"] == undisturbed(tmp_path_factory, *TWO)
    assert job.done["run"]["step"] > 0
