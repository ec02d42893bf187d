"""A child that follows scripts, shared by the tests of a file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headway.estimate.planner
from headway.estimate.planner import Planner, Trial, TrialResult
from tests.distributed import launching

ROOT = Path(__file__).resolve().parents[2]

Follow = Callable[..., TrialResult]
"""Returns what an attempt at a script found: its path, its arguments, and fields of Trial."""


@contextmanager
def warm_planners() -> Iterator[None]:
    """Fork the children of planners, where that is the same."""
    with pytest.MonkeyPatch.context() as patch:
        forks = SimpleNamespace(Popen=launching.popen, PIPE=subprocess.PIPE)
        patch.setitem(vars(headway.estimate.planner), "subprocess", forks)
        yield


@contextmanager
def follower() -> Iterator[Follow]:
    """Give a function that follows scripts; afterwards no file of theirs is left."""

    def follow(script: Path | str, *args: str, **options: Any) -> TrialResult:
        return planner.run(Trial(str(Path(script).resolve()), args, **options))

    with tempfile.TemporaryDirectory() as folder, warm_planners():
        with Planner([sys.executable], launching.environment(TMPDIR=folder)) as planner:
            yield follow
        assert not [*Path(folder).glob("headway-estimate-*")]
