"""Kills processes that save checkpoints at each event, and looks at what is left.

    python -m tests.checkpoint.killing --ranks 2 --keep 1 --stride 5

Prints one JSON object: how many were killed, and what is lost or mixed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.checkpoint import background, folders
from headway.checkpoint.folders import checkpoints_in, prune, recover
from headway.checkpoint.manifest import verify
from headway.checkpoint.saving import TENSORS, CheckpointProgress, Contents
from headway.checkpoint.tensors import SavedTensors
from tests.checkpoint.saving import save_checkpoint

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.link"}


def save(folder: Path, name: str, step: int, keep: int, rank: int = 0) -> None:
    """Save a checkpoint of which every part says its step."""

    def state(pending: Path) -> Contents:
        (pending / f"hook_{rank}.txt").write_text(str(step))
        values = {"model": torch.full((999,), step), "optimizer": {"a": torch.tensor(step)}}
        return Contents(values, {"generators": torch.full((5,), step)})

    save_checkpoint(
        folder / name, state, CheckpointProgress(step, 0), then=lambda: prune(folder, keep)
    )


def problem_in(folder: Path, at_least: int) -> str:
    """Return what is wrong with the checkpoints that are left; empty if nothing is."""
    for path in [*folder.iterdir()]:
        if path.name.startswith(".old-"):
            recover(folder / path.name.removeprefix(".old-")[:-9])
    found = checkpoints_in(folder)
    steps = [verify(item.path).step for item in found]
    if not found or steps[-1] < at_least:
        return f"lost: {steps}, not {at_least}"
    for checkpoint, step in zip(found, steps, strict=True):
        texts = [path.read_text() for path in checkpoint.path.glob("hook_*.txt")]
        saved = SavedTensors(checkpoint.path / TENSORS)
        tensors = saved.load(saved.meta_tensors)
        numbers = {number for tensor in tensors.values() for number in tensor.flatten().tolist()}
        if {*map(int, texts)} != {step} or numbers != {step}:
            return f"mixed: {texts} {numbers} in {step}"
    return ""


def kill_at(event: int, folder: Path) -> None:
    """Let this process be killed at its n-th event below a folder."""
    seen = count(1)

    def note(*_: object) -> None:
        if next(seen) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name in EVENTS and (name != "open" or str(arguments[0]).startswith(str(folder))):
            note()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            note()
            result = function(*arguments)
            note()
            return result

        return call

    os.fsync = noted(os.fsync)
    folders.exchange = noted(folders.exchange)
    sys.addaudithook(audit)


def run_rank(rank: int, ranks: int, store: Path, folder: Path, work: Callable[[], None]) -> None:
    """Do what one rank does, in a forked process, and end it."""
    code = 1
    try:
        if ranks > 1:
            limit = timedelta(seconds=60)
            meeting = dist.FileStore(str(store), ranks)
            dist.init_process_group(
                "gloo", store=meeting, rank=rank, world_size=ranks, timeout=limit
            )
        work()
        code = 0
    finally:
        os._exit(code)


def killed_at(
    event: int, victim: int, ranks: int, folder: Path, name: str, keep: int, exchanges: bool
) -> bool:
    """Save in processes of which one is killed at an event; return whether it was."""
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the others complain about the dead one
            if not exchanges:
                folders.exchange = lambda one, other: False

            def work(rank: int = rank) -> None:
                if rank == victim:
                    kill_at(event, folder)
                save(folder, name, 2, keep, rank)

            run_rank(rank, ranks, folder.with_suffix(".store"), folder, work)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    return os.WIFSIGNALED(statuses[victim])


def at_events(
    scratch: Path, ranks: int, keeps: list[int], stride: int, offset: int
) -> Iterator[tuple[str, bool, str]]:
    """Yield for each kill its case, whether it hit, and the problem."""
    base = scratch / "base"
    save(base, "a", 0, 2)
    save(base, "b", 1, 2)
    kinds = product(range(ranks), keeps, ["c", "b", "b without exchange"])
    for victim, keep, kind in kinds:
        hit, event = True, 1 + offset
        while hit:
            folder = scratch / "run"
            shutil.copytree(base, folder)
            hit = killed_at(event, victim, ranks, folder, kind[0], keep, "without" not in kind)
            yield f"rank {victim} keep {keep} to {kind}", hit, problem_in(folder, 1)
            shutil.rmtree(folder)
            folder.with_suffix(".store").unlink(missing_ok=True)
            event += stride


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--keep", type=int, action="append")
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    assert background  # imported before any fork
    with tempfile.TemporaryDirectory() as scratch:
        keeps = parsed.keep or [1]
        outcomes = [*at_events(Path(scratch), parsed.ranks, keeps, parsed.stride, parsed.offset)]
    problems = [f"{case}: {problem}" for case, _, problem in outcomes if problem]
    print(json.dumps({"killed": sum(hit for _, hit, _ in outcomes), "problems": problems}))


if __name__ == "__main__":
    main()
