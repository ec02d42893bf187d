"""Whoever is killed, whenever: no checkpoint is lost, and a training ends as if it were not."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date

import pytest

from tests.conftest import REPOSITORY
from tests.distributed.launching import environment, run

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm_pythons")
LONG = pytest.mark.long


def ended(module: str, *words: str, limit_s: float = 3500) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.checkpoint.{module}", *words]
    return run(command, environment(OMP_NUM_THREADS="1"), timeout_s=limit_s, cwd=REPOSITORY)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "at_least"),
    [
        (("--ranks", "2", "--stride", "19", "--offset", "3"), 7),
        (("--stride", "7"), 12),
        pytest.param(("--keep", "1", "--keep", "2"), 200, marks=LONG),
        pytest.param(("--ranks", "2", "--keep", "1", "--keep", "2"), 200, marks=LONG),
    ],
    ids=str,
)
@pytest.mark.timeout(3600)
def test_a_kill_while_saving_loses_and_mixes_nothing(words: tuple[str, ...], at_least: int) -> None:
    done = ended("killing", *words)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["problems"] == []
    assert seen["killed"] >= at_least


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="adopts what killed ranks leave")
@pytest.mark.parametrize("trials", [2, pytest.param(300, marks=LONG)])
@pytest.mark.timeout(3600)
def test_random_trainings_that_are_killed_end_as_if_they_were_not(trials: int) -> None:
    """Pairs by turns, a day each; what has failed says its seeds, with which it can be repeated."""
    first = 1000 if trials == 300 else date.today().toordinal() % 10 * 2
    limit_s = 290 if trials < 300 else 3500
    done = ended("trainings", "--first", str(first), "--trials", str(trials), limit_s=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
