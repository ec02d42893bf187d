"""What a run finds when it begins: variables, versions of packages, its code; and the record of it.

A launch of one process waits for this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from headway.contract.secrets import masked, masked_line
from headway.contract.typed import plain
from headway.history import store
from headway.history.code import copied_commit, read_commit
from headway.history.launch import Launch
from headway.machine.host import affects_training
from headway.settings.table import TABLE

_OF_THE_JOB = ("SLURM", "PMI", "OMPI_")
_VALUE = 400  # characters of a variable


def begin(path: str, start: Launch, diff_within_s: float) -> dict[str, Any]:
    """Write what is known of a run at its start, and return the record's fields; raises OSError."""
    folder = os.path.dirname(start.script) or start.folder
    copied = copied_commit(start.snapshot) if start.snapshot else None
    commit = copied or read_commit(folder, diff_within_s)
    record: dict[str, Any] = {
        "path": path,
        "start": plain(start),
        "commit": plain(commit),
        "packages": packages(sys.path),
        "kept": [],
        "restarts": [],
        "ranks": [],
        "end": None,
    }
    store.write(path, record)
    store.prune(os.path.dirname(path))
    return record


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect training, with secrets masked.

    Those of a scheduler, which are different in each job, are not among them.
    """
    found = {}
    for name, text in sorted(environ.items()):
        if affects_training(name) and not name.startswith(_OF_THE_JOB):
            is_env = name == TABLE["env"].variable
            found[name] = (masked_line(text) if is_env else masked(name, text))[:_VALUE]
    return found


def script_path(kind: str, name: str, environ: Mapping[str, str]) -> str:
    """Return the path of a program's file; empty for a module that only Python itself finds."""
    candidates = [name]
    if kind == "module":
        stem = name.replace(".", os.sep)
        here = [] if environ.get("PYTHONSAFEPATH") else [""]
        candidates = [
            os.path.join(folder, one)
            for folder in [*here, *environ.get("PYTHONPATH", "").split(os.pathsep)]
            for one in (f"{stem}.py", os.path.join(stem, "__main__.py"))
        ]
    return next((os.path.abspath(one) for one in candidates if os.path.isfile(one)), "")


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
