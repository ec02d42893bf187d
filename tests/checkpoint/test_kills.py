"""Whoever is killed, whenever: no checkpoint is lost, and a training ends as if it were not."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date

import pytest

from tests.conftest import REPOSITORY
from tests.distributed.launching import environment, run
from tests.waiting import IS_LONG

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm_pythons")
LIMIT_S = 3500 if IS_LONG else 290


def ended(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.checkpoint.{module}", *words]
    return run(command, environment(OMP_NUM_THREADS="1"), timeout_s=LIMIT_S, cwd=REPOSITORY)


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "stride", "at_least"), [("2", "19", 7), ("1", "7", 12)])
@pytest.mark.timeout(3600)
def test_a_kill_while_saving_loses_and_mixes_nothing(
    ranks: str, stride: str, at_least: int
) -> None:
    some = ("--stride", stride, "--offset", "3")
    done = ended(
        "killing", "--ranks", ranks, *(("--keep", "1", "--keep", "2") if IS_LONG else some)
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["problems"] == []
    assert seen["killed"] >= (200 if IS_LONG else at_least)


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="adopts what killed ranks leave")
@pytest.mark.timeout(3600)
def test_random_trainings_that_are_killed_end_as_if_they_were_not() -> None:
    """Pairs by turns, a day each; what has failed says its seeds, with which it can be repeated."""
    first, trials = (1000, 300) if IS_LONG else (date.today().toordinal() % 10 * 2, 2)
    done = ended("trainings", "--first", str(first), "--trials", str(trials))
    assert done.returncode == 0, done.stdout + done.stderr
