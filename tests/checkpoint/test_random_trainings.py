"""Trainings that are killed at random places end bit for bit as those that are not."""

from __future__ import annotations

import subprocess
import sys
from datetime import date

import pytest

from tests.conftest import REPOSITORY
from tests.distributed.launching import environment

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="adopts what killed ranks leave"),
]


def ended(*words: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.trainings", *words],
        env=environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def test_random_trainings_that_are_killed_end_as_if_they_were_not() -> None:
    """What has failed says its seeds, with which it can be repeated."""
    first = date.today().toordinal() % 2 * 10
    done = ended("--first", str(first), "--trials", "10", limit_s=290)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_300_random_trainings_that_are_killed_end_as_if_they_were_not() -> None:
    done = ended("--first", "1000", "--trials", "300", limit_s=3500)
    assert done.returncode == 0, done.stdout + done.stderr
