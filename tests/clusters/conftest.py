"""One SLURM for all tests of this folder, and why there is none."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clusters.slurm import NODES, SPARE, Slurm, unavailable_reason


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Return a SLURM with two nodes; skip where none can be started."""
    with running_slurm() as started:
        yield started


@pytest.fixture
def slurm_with_spare() -> Iterator[Slurm]:
    """Return a SLURM with a third node, which notices soon that a node has failed."""
    with running_slurm((*NODES, SPARE), node_timeout_s=10) as started:
        yield started


@contextmanager
def running_slurm(nodes: Sequence[str] = NODES, node_timeout_s: int = 300) -> Iterator[Slurm]:
    """Run a SLURM with these nodes; skip where none can be started."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="hwd-", ignore_cleanup_errors=True) as folder:
        started = Slurm(Path(folder), nodes, node_timeout_s)
        try:
            try:
                started.start()
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"SLURM does not start here: {error}")
            yield started
        finally:
            started.stop()
