"""Trainers of libraries are stopped and killed while they save, and lose nothing by it."""

from __future__ import annotations

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.launching import finished, launch, start
from tests.waiting import wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.long]

WORKER = str(Path(__file__).with_name("library_worker.py"))
SLOW = ("--nap", "0.05", "--save-nap", "0.3")
WHOLE = ("--nap", "0")


def require(*packages: str) -> None:
    """Skip a test without these; importing them would change this process's environment."""
    if not all(map(find_spec, packages)):
        pytest.skip(f"needs {packages}")


def begin_of_save(folder: Path, step: int) -> None:
    """Wait until a checkpoint is being written."""
    wait_until((folder / "out" / f"checkpoint-{step}" / "optimizer.pt").exists)


def steps(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "steps-0").read_text().split()]


def done(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "done.json").read_text()))


def test_trainer_on_two_ranks_is_killed_and_stopped_amid_saves_and_ends_with_the_same_weights(
    tmp_path: Path,
) -> None:
    require("transformers", "accelerate")
    words = ("--cpu", "--num-processes", "2")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert launch(*words, WORKER, "trainer", str(whole), *WHOLE).returncode == 0
    run = start(*words, WORKER, "trainer", str(cut), *SLOW)
    begin_of_save(cut, 10)
    os.kill(int((cut / "pid-0").read_text()), signal.SIGKILL)
    finished(run, 137)
    partial = cut / "out" / "checkpoint-10"
    assert not (partial / "trainer_state.json").exists(), "it was being written"
    run = start(*words, "--resume", "latest", WORKER, "trainer", str(cut), *SLOW)
    wait_until(lambda: steps(cut)[-2:] == [6, 7], run)
    assert partial.exists(), "it is left where it is"
    os.kill(run.pid, signal.SIGTERM)
    _, told = finished(run, 75)
    assert f"resuming from {cut / 'out' / 'checkpoint-5'}" in told
    stopped_after = steps(cut)[-1]
    launch(*words, "--resume", "latest", WORKER, "trainer", str(cut), *SLOW, code=0)
    assert stopped_after + 1 in steps(cut)[steps(cut).index(stopped_after) :]
    assert done(cut) == done(whole)


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def test_lightning_exits_after_the_step_when_the_job_is_asked_to_stop_and_resumes_when_asked(
    tmp_path: Path,
) -> None:
    require("lightning")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ("--workers", "2", "--nap")
    assert launch("--cpu", WORKER, "lightning", str(whole), *words, "0").returncode == 0
    hooked = ("--cpu", "--set", "library_hooks=yes")  # one process is plain Python otherwise
    run = start(*hooked, WORKER, "lightning", str(cut), *words, "0.2")
    wait_until(lambda: (cut / "steps-0").exists() and len(steps(cut)) >= 7, run)
    workers = children(run.pid)
    assert len(workers) >= 2
    for process in (*workers, run.pid):  # as a cluster does
        os.kill(process, signal.SIGTERM)
    finished(run, 75)
    again = launch("--cpu", "--resume", "latest", WORKER, "lightning", str(cut), *words, "0")
    assert (again.returncode, steps(cut)) == (0, [*range(1, 29)]), again.stderr
    assert done(cut)["step"] == done(whole)["step"]
