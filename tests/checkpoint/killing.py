"""Kills processes that save checkpoints, and looks at what is left: at each event, or at any time.

    python -m tests.checkpoint.killing events --ranks 2 --keep 1 --stride 5
    python -m tests.checkpoint.killing random --kills 30

Prints one JSON object: how many were killed, and what is lost or mixed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway import Accelerator
from headway.checkpoint import background, folders
from headway.checkpoint.folders import Checkpoint, checkpoints_in, prune, recover
from headway.checkpoint.manifest import verify
from headway.checkpoint.saving import TENSORS, CheckpointProgress, State
from headway.checkpoint.tensors import SavedTensors
from headway.utils import ProjectConfiguration
from tests.checkpoint.saving import save_checkpoint

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.link"}


def save(folder: Path, name: str, step: int, keep: int, rank: int = 0) -> None:
    """Save a checkpoint of which every part says its step."""

    def state(pending: Path) -> State:
        (pending / f"hook_{rank}.txt").write_text(str(step))
        values = {"model": torch.full((999,), step), "optimizer": {"a": torch.tensor(step)}}
        return State(values, {"generators": torch.full((5,), step)})

    save_checkpoint(
        folder / name, state, CheckpointProgress(step, 0), then=lambda _: prune(folder, keep)
    )


def problem_in(
    folder: Path, at_least: int, step_of: Callable[[Checkpoint], int], kind: str = ""
) -> str:
    """Return what is wrong with the checkpoints that are left; empty if nothing is.

    `step_of` is what a checkpoint says of its step; `kind` begins the names of tensors with it.
    """
    for path in [*folder.iterdir()]:
        if path.name.startswith(".old-"):
            recover(folder / path.name.removeprefix(".old-")[:-9])
    found = checkpoints_in(folder)
    steps = [*map(step_of, found)]
    if not found or steps[-1] < at_least:
        return f"lost: {steps}, not {at_least}"
    for one, step in zip(found, steps, strict=True):
        verify(one.path)
        texts = [path.read_text() for path in one.path.glob("hook_*.txt")]
        saved = SavedTensors(one.path / TENSORS)
        tensors = saved.load({n: fact for n, fact in saved.facts.items() if n.startswith(kind)})
        numbers = {number for tensor in tensors.values() for number in tensor.flatten().tolist()}
        if {*map(int, texts)} != {step} or numbers != {step}:
            return f"mixed: {texts} {numbers} in {step}"
    return ""


# ---------------------------------------------------------------------- at each event


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
            problem = problem_in(folder, 1, lambda one: one.manifest.step)
            yield f"rank {victim} keep {keep} to {kind}", hit, problem
            shutil.rmtree(folder)
            folder.with_suffix(".store").unlink(missing_ok=True)
            event += stride


# ---------------------------------------------------------------------- at any time


def save_for_ever(folder: Path, told: int, step: int) -> None:
    """Save again and again, and tell the steps that are surely saved."""
    project = ProjectConfiguration(
        str(folder), automatic_checkpoint_naming=True, total_limit=1, iteration=step
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare_model(torch.nn.Linear(300, 300), evaluation_mode=True)
    while True:
        step += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        accelerator.project_configuration.iteration = step
        accelerator.register_save_state_pre_hook(
            lambda models, weights, path, step=step: (Path(path) / "hook_0.txt").write_text(
                str(step)
            )
        )
        accelerator.save_state(wait=step % 2 == 0)
        if step % 2 == 0:
            os.write(told, f"{step}\n".encode())


def at_any_time(scratch: Path, kills: int) -> Iterator[tuple[str, bool, str]]:
    """Yield the same for kills after random times."""
    draw, saved = random.Random(7), 0
    for _ in range(kills):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            save_for_ever(scratch, writing, saved + 10)
        os.close(writing)
        with os.fdopen(reading) as told:
            first = told.readline()
            time.sleep(draw.uniform(0, 0.2))
            os.kill(pid, signal.SIGKILL)
            steps = [int(line) for line in (first + told.read()).split()]
        os.waitpid(pid, 0)
        saved = steps[-1]
        folder = scratch / "checkpoints"
        problem = problem_in(folder, saved, lambda one: int(one.path.name[11:]), "shared.models")
        yield "any time", True, problem


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["events", "random"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--keep", type=int, action="append")
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--kills", type=int, default=30)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    assert background  # imported before any fork
    with tempfile.TemporaryDirectory() as scratch:
        if parsed.kind == "random":
            outcomes = list(at_any_time(Path(scratch), parsed.kills))
        else:
            outcomes = list(
                at_events(
                    Path(scratch), parsed.ranks, parsed.keep or [1], parsed.stride, parsed.offset
                )
            )
    problems = [f"{case}: {problem}" for case, _, problem in outcomes if problem]
    print(json.dumps({"killed": sum(hit for _, hit, _ in outcomes), "problems": problems}))


if __name__ == "__main__":
    main()
