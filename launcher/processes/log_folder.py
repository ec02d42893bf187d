"""Checks `log_dir` before the launch, and creates the run's log folder when ranks start."""

from __future__ import annotations

import os
import time

from headway.errors import Code, LaunchError, Problem
from headway.settings.table import TABLE, Settings


def log_dir_problems(settings: Settings) -> list[Problem]:
    """Check whether `log_dir` is writable: create a folder in it, and remove the folder again."""
    if settings.log_dir is None or "log_dir" in settings.invalid:
        return []
    import tempfile

    parent = os.path.abspath(settings.log_dir)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    try:
        os.rmdir(tempfile.mkdtemp(dir=parent))
    except OSError as error:
        return [_cannot_write(settings, error)]
    return []


def create_log_folder(settings: Settings) -> str | None:
    """Create a new folder in `log_dir`, so that earlier logs are not overwritten."""
    if settings.log_dir is None:
        return None
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if settings.num_machines > 1:  # machines may share log_dir, and pids may be equal
        import socket

        name += f"-{socket.gethostname()}"
    folder = os.path.join(settings.log_dir, name)
    try:
        os.makedirs(folder)
    except OSError as error:
        raise LaunchError.of([_cannot_write(settings, error)]) from None
    return folder


def _cannot_write(settings: Settings, error: OSError) -> Problem:
    return Problem(
        f"log_dir {settings.log_dir!r} cannot be written to: {error.strerror}",
        str(settings.origin("log_dir")),
        f"pass a writable folder: {TABLE['log_dir'].flag} logs",
        code=Code.BAD_VALUE,
        names=("log_dir",),
    )
