"""A child that follows scripts, shared by the tests of a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from headway.contract.lines import encode
from headway.estimate.attempt import Attempt, Outcome, decode_outcome
from headway.estimate.planner import CONFINED

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """The process that forks one for each attempt; a context."""

    def __enter__(self) -> Server:
        environ = {**os.environ, **CONFINED, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headway.estimate.child.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            pass

    def follow(self, script: Path, *args: str, **options: Any) -> Outcome:
        """Return what an attempt at a script found."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        attempt = Attempt(str(script.resolve()), args, **options)
        self._process.stdin.write(encode(attempt).decode())
        self._process.stdin.flush()
        return decode_outcome(self._process.stdout.readline())
