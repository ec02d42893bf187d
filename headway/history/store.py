"""The folder of records, and what a record has from the beginning: the launch, its code, versions.

One folder a run, which only its user may enter. A launch of one process waits for this.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from headway.ipc.paths import is_absent, user_folder, write_atomic
from headway.ipc.secrets import masked, masked_line
from headway.ipc.typed import plain, read
from headway.machine.host import affects_training
from headway.settings.table import TABLE

FORMAT = 3
"""Of records: raised with every change of their classes, as no other format is read."""

MAX_RUNS = 200
FILE = "run.json"
_OF_THE_JOB = ("SLURM", "PMI", "OMPI_")
_VALUE = 400  # characters of a variable
COPIED_FROM = "commit.json"
"""Has the commit, beside the folder of a job's copy of the code."""
_CHUNK = 2**16
_WITHIN_S = 20.0
_DIFF_CHARS = 200 * 2**10
_CONFIG = ("-c", "core.fsmonitor=false", "-c", "core.bigFileThreshold=1m")  # no diff of larger ones
_PLAIN = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")


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
        "attempts": [],
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
    write_atomic(os.path.join(path, FILE), text)


def lost(error: OSError) -> str:
    """Return the message for a run without a record, or with an incomplete one."""
    return f"note: the record of this run is lost: {error.strerror} (--record off keeps none)"


def names_in(folder: str) -> list[str]:
    """Return the names of the runs in a folder, the newest last; OSError if it cannot be read."""
    if is_absent(folder):
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def prune(folder: str) -> None:
    """Remove the oldest runs above the limit; a running run rewrites its record."""
    for name in names_in(folder)[:-MAX_RUNS]:
        import shutil

        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


# ------------------------------------------------------------------ what git knows of the code


class Commit(NamedTuple):
    root: str
    commit: str
    diff: str | None  # of the files against the commit; None: git took too long


def copied_commit(code: str) -> Commit | None:
    """Return the commit from which a copy of code was made; None if it is not a copy."""
    about = os.path.join(os.path.dirname(code), COPIED_FROM)
    with suppress(OSError, ValueError), open(about, "rb") as file:
        return read(Commit, json.loads(file.read()))
    return None


def read_commit(folder: str, within_s: float = _WITHIN_S) -> Commit | None:
    """Return the commit of the repository that holds a folder; None without one.

    Secrets in the diff are masked, and a long diff is cut; git may take `within_s`.
    """
    here = os.path.realpath(folder)
    while not os.path.lexists(os.path.join(here, ".git")):
        if here == os.path.dirname(here):
            return None
        here = os.path.dirname(here)
    head = _head(here) or git(here, "rev-parse", "HEAD", within_s=within_s)
    if head is None:
        return None
    diff = git(here, "diff", *_PLAIN, "HEAD", within_s=within_s)
    if diff:
        from headway.ipc.secrets import masked_text

        diff = masked_text(diff[:_DIFF_CHARS])
    return Commit(here, head.strip(), diff)


def _head(root: str) -> str:
    """Return the commit of HEAD from two files: a call of git would delay the start."""
    folder = os.path.join(root, ".git")
    with suppress(OSError), open(os.path.join(folder, "HEAD")) as head:
        name = head.read().removeprefix("ref: ").strip()
        if "/" not in name:
            return name
        with open(os.path.join(folder, name)) as branch:
            commit = branch.read().strip()
            return commit if commit.isalnum() else ""
    return ""


def git(folder: str, *words: str, within_s: float = _WITHIN_S) -> str | None:
    """Return what git prints in a folder; None if it fails or takes too long.

    Does not use subprocess, whose import takes longer than git.
    """
    import select

    output, write = os.pipe()
    try:
        pid = os.posix_spawnp(
            "git",
            ["git", "--no-optional-locks", *_CONFIG, "-C", folder, *words],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, write, 1),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
        )
    except OSError:
        os.close(output)
        return None
    finally:
        os.close(write)
    text = b""
    has_more = select.poll()
    has_more.register(output)
    until = time.monotonic() + within_s
    while has_more.poll(max(until - time.monotonic(), 0) * 1000):
        if not (chunk := os.read(output, _CHUNK)):
            break
        text += chunk
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(output)
    return None if os.waitpid(pid, 0)[1] else text.decode(errors="replace")
