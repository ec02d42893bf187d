"""Selects the checkpoint from which a run goes on, on rank 0."""

from __future__ import annotations

import os
from itertools import dropwhile
from pathlib import Path

from headway.checkpoint.manifest import NAME, read_manifest, read_plain
from headway.checkpoint.project import Candidate, candidates, newest_whole, resolve_checkpoint
from headway.checkpoint.saving import on_rank_0
from headway.contract.run import LATEST, NEWEST, is_restart
from headway.contract.typed import parse
from headway.errors import CheckpointError, Problem
from headway.trackers.tracking import RUNS_FILE
from headway.training.arguments import EffectiveSettings


def select_checkpoint(
    settings: EffectiveSettings, project: Path, fall_back: bool
) -> tuple[str | None, list[str]]:
    """Return the checkpoint to go on from, None for a fresh start, and lines about those left out.

    With `fall_back` damaged ones are left out.
    """
    wanted, there = settings.run.resume, candidates(project)
    found = there
    if wanted is not None and wanted not in NEWEST:
        found = _saved_before_restart(settings, there)
        if not found:
            path = resolve_checkpoint(Path(wanted).expanduser())
            read_manifest(path)
            return str(path), []
    if not found:
        if wanted == LATEST:
            raise CheckpointError(
                "there is no checkpoint to go on from",
                where=f"{project}, asked for by {settings.where('resume')}",
                fix="leave it out: accelerator.resume() goes on from the newest checkpoint where"
                " there is one, and starts from the beginning where there is none",
            )
        return None, []
    if not fall_back:
        return str(found[-1].path), []
    whole, faults = newest_whole(found)
    if whole is None and candidates(project) != there:  # another run has removed these
        return select_checkpoint(settings, project, fall_back)
    if whole is None:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints is whole: "
            + "; ".join(f"{one.what} ({one.where})" for one in _problems(faults)),
            where=str(project),
            fix="move them away to start from the beginning",
        )
    return str(whole), [f"left out: {one.what} ({one.where})" for one in _problems(faults)]


def tracked_runs(checkpoint: Path) -> dict[str, str]:
    """Return the runs of trackers that a checkpoint names, by tracker; it need not be verified.

    One that was imported from Accelerate names none.
    """
    if RUNS_FILE not in {file.path for file in read_manifest(checkpoint).files}:
        return {}
    path = checkpoint / RUNS_FILE
    try:
        runs = parse(read_plain(path))
        if not isinstance(runs, dict) or not all(isinstance(one, str) for one in runs.values()):
            raise ValueError("it does not give each tracker the name of a run")
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(
            f"the runs of trackers cannot be read: {error}",
            where=str(path),
            fix="go on from another checkpoint: `headway checkpoint ls` lists them",
        ) from None
    return runs


def _problems(faults: list[CheckpointError]) -> list[Problem]:
    return [fault.problems[0] for fault in faults]


def _saved_before_restart(settings: EffectiveSettings, found: list[Candidate]) -> list[Candidate]:
    """Return what this launch has saved before it restarted its ranks, the newest last.

    A damaged one does not say which launch saved it; it counts if it is newer than another of this
    launch.
    """
    if not is_restart() or not settings.run.began_at:
        return []
    saved = [one for one in found if one.launched_at in (settings.run.began_at, None)]
    return [*dropwhile(lambda one: one.launched_at is None, saved)]


def explain_damage(error: CheckpointError, path: Path, project: Path) -> None:
    """Raise an error that says how to go on, if `path` is damaged; every rank calls this."""

    def look() -> tuple[bool, bool, Path | None]:
        others = [one for one in candidates(project) if one.path != path]
        is_whole = newest_whole([Candidate(0.0, path)])[0] is not None
        is_there = os.path.lexists(path / NAME)
        return is_there, is_whole, None if is_whole else newest_whole(others)[0]

    is_there, is_whole, other = on_rank_0(look)
    if is_whole:
        return
    problem = error.problems[0]
    what, fix = problem.what, f"move {path} away to start from the beginning"
    if not is_there:
        what = "the checkpoint was removed while it was loaded"
        fix = "let no other run save to this project folder, or prune it, and run it again"
    elif other is not None:
        fix = f"accelerator.resume(fall_back=True) goes on from {other}; or move {path} away"
    raise CheckpointError(what, where=problem.where, fix=fix) from None
