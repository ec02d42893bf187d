"""A job that is stopped or killed at any time goes on as if nothing had happened."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from headway.history.record import read_all
from tests.distributed.families import process_of_this_test, processes_of_this_test, survivors
from tests.distributed.launching import on_linux, start
from tests.waiting import IS_LONG, wait_for_lines, wait_until

pytest.importorskip("torch")
pytestmark = [*on_linux, pytest.mark.timeout(300)]  # two runs, which may take LIMIT_S each

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
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_batches(self, process: subprocess.Popen[str], count: int) -> None:
        wait_until(lambda: len(self.ledger()) >= count, process)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    @property
    def done(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "done.json").read_text())
        return found


def ended(process: subprocess.Popen[str]) -> Outcome:
    out, errors = process.communicate(timeout=LIMIT_S)
    assert not survivors()
    return process.returncode, out + errors


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return what gives the weights of a job that nothing has interrupted."""

    @cache
    def weights(*flags: str) -> str:
        job = Job(tmp_path_factory.mktemp("undisturbed") / "job", *flags)
        finish(job)
        return str(job.done["weights"])

    return weights


def require_exact(job: Job, ranks: int) -> None:
    """Require that each sample and each step was there once, in order."""
    ledgers = [job.ledger(rank) for rank in range(ranks)]
    seen = Counter((epoch, x) for ledger in ledgers for epoch, _, batch in ledger for x in batch)
    assert seen == Counter((epoch, i) for epoch in range(EPOCHS) for i in range(NUM_SAMPLES))
    for ledger in ledgers:
        steps = [step for _, step, _ in ledger]
        assert steps == sorted(steps)
        assert {*steps} == {*range(STEPS + 1)}
    assert job.done["steps"] == STEPS


TWO = ("--num-processes", "2")


def interrupt(
    job: Job, process: subprocess.Popen[str], send: Callable[[], None], dice: random.Random
) -> Outcome:
    """Let a job train a random number of batches, and then send it a signal.

    The first checkpoint() comes after the first batch; from there on signals are noted.
    """
    job.wait_for_batches(process, len(job.ledger()) + dice.randint(2, 5))
    send()
    code, text = ended(process)
    assert "Traceback" not in text
    assert len({len(job.ledger(rank)) for rank in range(len(list(job.folder.glob("pid-?"))))}) == 1
    return code, text


def require_saved(outcome: Outcome, code: int = 75) -> None:
    assert outcome[0] == code, outcome[1]
    assert outcome[1].count("stopped by") == 1, outcome[1]


def finish(job: Job) -> None:
    code, text = ended(job.start("--nap", "0"))
    assert code == 0, text


def test_two_ranks_that_are_stopped_in_any_way_repeat_nothing_and_miss_nothing(
    tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    job, dice = Job(tmp_path / "job", *TWO), random.Random()
    process = job.start("--workers", "2")
    require_saved(interrupt(job, process, partial(send_to_all, signal.SIGTERM), dice))
    process = job.start()
    require_saved(interrupt(job, process, partial(one_rank, job, 1, signal.SIGUSR1), dice))
    process = job.start("--workers", "2")
    require_saved(interrupt(job, process, partial(send_to_all, signal.SIGXCPU), dice))
    process = job.start("--workers", "2")
    require_saved(interrupt(job, process, partial(process.send_signal, signal.SIGINT), dice), 130)
    finish(job)
    require_exact(job, 2)
    assert job.done["weights"] == undisturbed(*TWO)


def send_to_all(number: signal.Signals) -> None:
    """Send a signal to every process of a job, as SLURM and a terminal do."""
    for process in processes_of_this_test():
        process.send_signal(number)


def one_rank(job: Job, rank: int, number: signal.Signals) -> None:
    process_of_this_test(job.pid(rank)).send_signal(number)


def test_ranks_that_are_killed_at_random_are_restarted_and_end_with_the_same_weights(
    tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    job, dice, count = Job(tmp_path / "job", *TWO), random.Random(), 20 if IS_LONG else 2
    process = job.start(flags=("--max-restarts", str(count), "--set", "restart_delay=0"))
    killed: set[int] = set()
    for step in sorted(dice.randrange(STEPS - 3) for _ in range(count)):
        wait_until(
            lambda: all((job.folder / f"pid-{rank}").exists() for rank in (0, 1)),
            process,
        )
        victim = dice.randint(0, 1)
        wait_until(partial(is_new, job, victim, killed), process)
        wait_until(partial(has_come_to, job, step, len(job.ledger())), process)
        killed |= {job.pid(0), job.pid(1)}
        one_rank(job, victim, signal.SIGKILL)
    code, text = ended(process)
    assert code == 0, text
    assert text.count("; restart ") == count
    assert job.done["steps"] == STEPS
    assert job.done["weights"] == undisturbed(*TWO)


def has_come_to(job: Job, step: int, before: int) -> bool:
    """Return whether a step was reached after the first `before` batches."""
    return any(done >= step for _, done, _ in job.ledger()[before:])


def is_new(job: Job, rank: int, pids: set[int]) -> bool:
    return job.pid(rank) not in pids


def test_one_process_saves_at_its_time_limit_and_on_ctrl_c_but_not_before_it_asks(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path / "job")
    process = job.start("--never")
    wait_until(lambda: (job.folder / "pid-0").exists(), process)
    process.terminate()
    assert ended(process)[0] == -signal.SIGTERM  # 143 in a shell
    assert not job.ledger()
    require_saved(ended(job.start(flags=("--time-limit", "1s"))))
    process = job.start("--workers", "2")
    interrupted = partial(send_to_all, signal.SIGINT)
    require_saved(interrupt(job, process, interrupted, random.Random()), 130)
    finish(job)
    require_exact(job, 1)
    assert [run.end and run.end.exit_code for run in read_all()[0]] == [None, 75, 130, 0]


def test_a_rank_that_is_killed_while_its_job_stops_is_named_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path / "job", *TWO)
    process = job.start("--nap-from", "2", "--nap", "60")
    wait_until(lambda: all(len(job.ledger(rank)) > 1 for rank in (0, 1)), process)
    process.terminate()
    wait_for_lines(process, "SIGTERM")
    one_rank(job, 1, signal.SIGKILL)
    code, text = ended(process)
    assert code == 128 + signal.SIGKILL
    assert "rank 1 of 2 was killed by SIGKILL" in text
    assert "error: " in text


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_many_signals_at_random_times_lose_nothing(
    ranks: int, tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    flags = ("--num-processes", str(ranks)) if ranks > 1 else ()
    dice, stops = random.Random(), 0
    while stops < 25:
        job = Job(tmp_path / f"job-{stops}", *flags)
        is_done = (job.folder / "done.json").exists
        while not is_done():
            process = job.start()
            begun = len(job.ledger()) + 1  # from its first checkpoint() on, signals are noted
            # one that was stopped after its last batch has none left
            wait_until(lambda: len(job.ledger()) > begun or is_done(), process)  # noqa: B023
            time.sleep(dice.uniform(0, 0.5))
            process.send_signal(dice.choice([signal.SIGTERM, signal.SIGUSR1]))
            code, text = ended(process)
            assert code in (0, 75) or (job.folder / "done.json").exists(), text
            stops += code == 75
        require_exact(job, ranks)
        assert job.done["weights"] == undisturbed(*flags)
