"""Starts the ranks of the runtime's tests, without a launcher."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.distributed import launching

WORKER = Path(__file__).with_name("runtime_worker.py")
LIMIT_S = 280  # beside other tests on a busy machine
Seen = list[dict[str, Any]]


def run_ranks(
    world: int, folder: Path, worker: Path = WORKER, *arguments: str, limit_s: float = LIMIT_S
) -> Seen | str:
    """Return what each rank of `worker` saw, or the output of one that failed."""
    command = [sys.executable, str(worker), str(folder), *arguments]
    with tempfile.TemporaryDirectory() as scratch:  # a short path, for the sockets in it
        return _run_ranks(world, folder, scratch, command, limit_s)


def _run_ranks(
    world: int, folder: Path, scratch: str, command: list[str], limit_s: float
) -> Seen | str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        launching.popen(
            command,
            env=environment(rank, world, port) | {"TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for rank, process in enumerate(ranks):
            output, _ = process.communicate(timeout=limit_s)
            if process.returncode:
                return f"rank {rank} of {world} ended with {process.returncode}:\n{output}"
    except subprocess.TimeoutExpired as expired:
        return f"the ranks took more than {limit_s} s:\n{expired.output!r}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
    return [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    foreign = ("HEADWAY_", "ACCELERATE_", "COV_CORE")
    usual = launching.environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    plain = {name: value for name, value in usual.items() if not name.startswith(foreign)}
    if world == 1:
        return plain
    return plain | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
