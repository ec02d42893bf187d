"""The folder of records, and what a record has from the beginning: what was launched, its code, the
versions of packages.

One folder a run, which only its user may enter. A launch of one process waits for this.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from headway.contract.paths import is_absent
from headway.contract.secrets import masked, masked_line
from headway.contract.typed import plain
from headway.contract.user_folders import user_folder
from headway.history.code import copied_commit, read_commit
from headway.machine.host import affects_training
from headway.settings.table import TABLE

FORMAT = 1
"""Of records: raised with every change of their classes, as no other format is read."""

MAX_RUNS = 200
FILE = "run.json"
_OF_THE_JOB = ("SLURM", "PMI", "OMPI_")
_VALUE = 400  # characters of a variable


class Launch(NamedTuple):
    """What was launched; secrets are masked."""

    began_at: float
    pid: int
    host: str
    folder: str
    kind: str  # as of a plan's program
    program: str
    script: str  # the path of its file; empty where that is not known
    arguments: tuple[str, ...]
    command: tuple[str, ...]  # the words after `headway launch`
    python: tuple[str, ...]
    settings: Mapping[str, str]  # their values as text
    origins: Mapping[str, str]  # where each setting that is no default came from
    environment: Mapping[str, str]  # the variables that the setting `env` gives
    machine: Mapping[str, str]
    variables: Mapping[str, str]  # of the environment, those that affect training
    num_processes: int
    num_machines: int
    supervised: str | None  # why a launcher stayed; None: the script replaced it
    job: str  # of a scheduler; empty for none
    snapshot: str  # the folder of the copy of the code that was run; empty for none
    is_rank: bool  # the script found RANK, WORLD_SIZE, ...


def begin(path: str, start: Launch, diff_within_s: float = 20.0) -> dict[str, Any]:
    """Write a run's record at its start, and return its fields; raises OSError."""
    folder = os.path.dirname(start.script) or start.folder
    copied = copied_commit(start.snapshot) if start.snapshot else None
    commit = copied or read_commit(folder, diff_within_s)
    record: dict[str, Any] = {
        "path": path,
        "start": plain(start),
        "commit": plain(commit),
        "packages": packages(sys.path),
        "kept": [],
        "ranks": [],
        "end": None,
    }
    write(path, record)
    prune(os.path.dirname(path))
    return record


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect training, without a scheduler's, with secrets masked."""
    found = {}
    for name, text in sorted(environ.items()):
        if affects_training(name) and not name.startswith(_OF_THE_JOB):
            is_env = name == TABLE["env"].variable
            found[name] = (masked_line(text) if is_env else masked(name, text))[:_VALUE]
    return found


def script_path(kind: str, name: str) -> str:
    """Return the path of a program's file; empty for a module."""
    return os.path.abspath(name) if kind != "module" and os.path.isfile(name) else ""


def packages(path: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages, by the names of their folders of metadata."""
    found: dict[str, str] = {}
    for folder in path:
        with suppress(OSError):
            for entry in os.listdir(folder or "."):
                if entry.endswith((".dist-info", ".egg-info")):
                    name, _, version = entry.rpartition(".")[0].partition("-")
                    found.setdefault(name.lower().replace("_", "-"), version)
    return dict(sorted(found.items()))


def runs_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder of all records, whether or not it exists."""
    return os.path.join(user_folder("state", environ), "runs")


def new_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return a new run's path, unique also among containers that share the home folder."""
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"
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
    for name in names_in(folder)[:-MAX_RUNS]:
        import shutil

        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
