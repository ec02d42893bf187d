"""Checks before a launch that the checkpoint to go on from is one."""

from __future__ import annotations

from headway.contract.run import NEWEST
from headway.errors import CheckpointError, Code, Problem
from headway.settings.table import Settings


def resume_problems(settings: Settings) -> list[Problem]:
    """Return why a launch cannot go on from `resume`; its files are looked at by the script."""
    if settings.resume in (None, *NEWEST) or "resume" in settings.unread:
        return []
    from pathlib import Path

    from headway.checkpoint.manifest import read_manifest
    from headway.checkpoint.project import resolve_checkpoint
    from headway.libraries.folders import is_of_library

    path = Path(settings.resume).expanduser()
    if is_of_library(path):
        return []
    try:
        read_manifest(resolve_checkpoint(path))
    except CheckpointError as error:
        (problem,) = error.problems
        where = f"{settings.origin('resume')}; {problem.where}"
        return [problem._replace(where=where, code=Code.BAD_VALUE, names=("resume",))]
    return []
