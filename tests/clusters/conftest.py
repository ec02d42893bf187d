"""One SLURM for all tests of this folder, and why there is none."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.slurm import Slurm, why_not


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Return a SLURM with two nodes; skip where none can be started."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="hwd-", ignore_cleanup_errors=True) as folder:
        started = Slurm(Path(folder))
        try:
            try:
                started.start()
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"SLURM does not start here: {error}")
            yield started
        finally:
            started.stop()
