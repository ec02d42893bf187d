"""failure.json: what is kept of a failed run for programs, in the log folder of each machine."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from headway.contract.notes import say
from headway.launcher.diagnosis.failures import Failure, ServerDeath
from headway.launcher.diagnosis.hang import Hang
from headway.settings.profile_files import shown

if TYPE_CHECKING:
    from headway.launcher.machines.messages import Failed

OF_A_MACHINE = "machine"
"""The `reason` of a failure that is no rank's, or whose record is on another machine."""


def place_of(failure: Failure | Hang | ServerDeath, folder: str | None) -> str:
    place = socket.gethostname()
    if isinstance(failure, Failure):
        place = f"process {failure.first.pid} on {place}"
    return place if folder is None else f"{place}; logs in {shown(folder)}"


def record_here(failure: Failure | Hang | ServerDeath, machine: int, folder: str | None) -> str:
    """Return the record of a failure on this machine, with its logs in the folder, as JSON."""
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
    """Write failure.json, in full or not at all; print a note where that fails."""
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
