"""Whoever is killed while saving, whenever: the newest checkpoint is whole, and none is lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.distributed.launching import environment

pytest.importorskip("torch")
pytestmark = pytest.mark.processes
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("words", "at_least"),
    [
        (("events", "--ranks", "2", "--stride", "9", "--offset", "3"), 15),
        (("random", "--kills", "30"), 30),
        pytest.param(("events", "--keep", "1", "--keep", "2"), 200, marks=LONG),
        pytest.param(("events", "--ranks", "2", "--keep", "1", "--keep", "2"), 200, marks=LONG),
        pytest.param(("random", "--kills", "300"), 300, marks=LONG),
    ],
    ids=str,
)
@pytest.mark.timeout(3600)
def test_a_kill_while_saving_loses_and_mixes_nothing(words: tuple[str, ...], at_least: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.killing", *words],
        env=environment(OMP_NUM_THREADS="1"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["problems"] == []
    assert seen["killed"] >= at_least
