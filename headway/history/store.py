"""The folder of records: one folder a run, which only its user may enter."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headway.contract.paths import is_absent
from headway.contract.user_folders import user_folder

FORMAT = 1
"""Of records: raised with every change of their classes, as no other format is read."""

MAX_RUNS = 200
_SLACK = 50  # more than these are removed at once, so that few launches do it
FILE = "run.json"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def runs_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder of all records, whether or not it exists."""
    return os.path.join(user_folder("state", environ), "runs")


def new_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return a new run's path, unique also among containers that share the home folder."""
    letters = "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(6))
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{letters}"
    return os.path.join(runs_folder(environ), name)


def write(path: str, record: Mapping[str, Any]) -> None:
    """Write the fields of a record in place of earlier ones; raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    text = json.dumps({"format": FORMAT, **record}, separators=(",", ":"))
    partial = os.path.join(path, f".{FILE}-{os.getpid()}")
    with open(partial, "w") as file:
        file.write(text)
    os.replace(partial, os.path.join(path, FILE))


def lost(error: OSError) -> str:
    """Return the message for a run without a record, or with an incomplete one."""
    return f"note: the record of this run is lost: {error.strerror} (--record off keeps none)"


def names_in(folder: str) -> list[str]:
    """Return the names of the runs in a folder, the newest last; OSError if it cannot be read."""
    if is_absent(folder):
        return []
    with os.scandir(folder) as entries:
        return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))


def prune(folder: str) -> None:
    """Remove the oldest runs above the limit; a running run rewrites its record."""
    names = names_in(folder)
    if len(names) > MAX_RUNS + _SLACK:
        import shutil

        for name in names[:-MAX_RUNS]:
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
