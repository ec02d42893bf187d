"""A child that follows scripts, shared by the tests of a file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.estimate.planner import Attempt, Outcome, Planner

ROOT = Path(__file__).resolve().parents[2]

Follow = Callable[..., Outcome]
"""Returns what an attempt at a script found: its path, its arguments, and fields of Attempt."""


@contextmanager
def follower() -> Iterator[Follow]:
    """Give a function that follows scripts; afterwards no file of theirs is left."""

    def follow(script: Path | str, *args: str, **options: Any) -> Outcome:
        return planner.follow(Attempt(str(Path(script).resolve()), args, **options))

    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": folder}
        with Planner([sys.executable], environ) as planner:
            yield follow
        assert not [*Path(folder).glob("headway-estimate-*")]
