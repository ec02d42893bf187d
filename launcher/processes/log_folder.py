"""The folder of a run's logs: checked before anything starts; failure.json, for programs."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from headway.contract.notes import say
from headway.errors import Code, LaunchError, Problem
from headway.launcher.diagnosis.failures import Failure, ServerDeath
from headway.launcher.diagnosis.hang import Hang
from headway.settings.profile_files import shown
from headway.settings.table import TABLE, Settings

if TYPE_CHECKING:
    from headway.launcher.machines.messages import Failed


def log_dir_problems(settings: Settings) -> list[Problem]:
    """Return why no folder can be created in `log_dir`; nothing is left there."""
    if settings.log_dir is None or "log_dir" in settings.unread:
        return []
    import tempfile

    there = os.path.abspath(settings.log_dir)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    try:
        os.rmdir(tempfile.mkdtemp(dir=there))
    except OSError as error:
        what, where, fix = _cannot_write(settings, error)
        return [Problem(what, where, fix, code=Code.BAD_VALUE, names=("log_dir",))]
    return []


def create_log_folder(settings: Settings) -> str | None:
    """Create a new folder in `log_dir`, so that earlier logs are not overwritten.

    Raises:
        LaunchError: the system refuses.
    """
    if settings.log_dir is None:
        return None
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if settings.num_machines > 1:  # which may share log_dir, and count processes alike
        import socket

        name += f"-{socket.gethostname()}"
    folder = os.path.join(settings.log_dir, name)
    try:
        os.makedirs(folder)
    except OSError as error:
        what, where, fix = _cannot_write(settings, error)
        raise LaunchError(what, where=where, fix=fix) from None
    return folder


def _cannot_write(settings: Settings, error: OSError) -> tuple[str, str, str]:
    """Return what is wrong, where it comes from, and the fix."""
    return (
        f"log_dir {settings.log_dir!r} cannot be written to: {error.strerror}",
        str(settings.origin("log_dir")),
        f"name a folder that you can write to: {TABLE['log_dir'].flag} logs",
    )


OF_A_MACHINE = "machine"
"""The `reason` of a failure that is no rank's, or whose record is on another machine."""


def place_of(failure: Failure | Hang | ServerDeath, folder: str | None) -> str:
    """Return where a failure on this machine happened: process, host, logs."""
    place = socket.gethostname()
    if isinstance(failure, Failure):
        place = f"process {failure.first.pid} on {place}"
    return place if folder is None else f"{place}; logs in {shown(folder)}"


def record_here(failure: Failure | Hang | ServerDeath, machine: int, folder: str | None) -> str:
    """Return the record of a failure on this machine, as JSON.

    Args:
        failure: of its ranks.
        machine: its rank.
        folder: with its logs.
    """
    logs = folder and os.path.abspath(folder)
    place = {"machine": machine, "host": socket.gethostname(), "logs": logs}
    return json.dumps({**failure.as_json(), **place}, indent=2)


def record_elsewhere(failed: Failed) -> str:
    """Return the record of a failure on another machine: all of it on machine 0, else the cause."""
    return failed.record or json.dumps(
        {
            "reason": OF_A_MACHINE,
            "cause": failed.cause,
            "exit_code": failed.exit_code,
            "fix": failed.fix,
            "machine": failed.machine,
            "host": failed.host,
        },
        indent=2,
    )


def write_record(record: str, folder: str) -> None:
    """Write failure.json, in full or not at all; say so where that cannot be done."""
    path = os.path.join(folder, "failure.json")
    partial = f"{path}.tmp"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(record)
        os.replace(partial, path)
    except OSError as error:  # the report still comes to the terminal
        with suppress(OSError):
            os.unlink(partial)
        say(f"failure.json could not be written to {shown(folder)}: {error.strerror}")
