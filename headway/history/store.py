"""The folder of records, and a record's initial contents: launch, code and package versions.

Each run has a folder that only its user can access. A launch of a single process waits until
`begin` returns.
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

FORMAT = 5
"""Format version of records, incremented with each change; other versions cannot be read."""

MAX_RUNS = 200
FILE = "run.json"
_OF_THE_JOB = ("SLURM", "PMI", "OMPI_")
_VALUE = 400  # maximum length of a variable's value
COPIED_FROM = "commit.json"
"""The file with the commit of a job's copy of the code, next to the folder of the copy."""
_CHUNK = 2**16
_WITHIN_S = 20.0  # for a git command on slow storage; launches of several processes do not wait
_DIFF_CHARS = 200 * 2**10
_CONFIG = ("-c", "core.fsmonitor=false", "-c", "core.bigFileThreshold=1m")  # skips large files
_PLAIN = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")


class Launch(NamedTuple):
    """The launch of a run, with secrets masked."""

    began_at: float
    pid: int
    host: str
    folder: str
    program: str
    script: str  # path of the script; empty if unknown
    arguments: tuple[str, ...]
    command: tuple[str, ...]  # the words after `headway launch`
    python: tuple[str, ...]
    settings: Mapping[str, str]  # values as text
    origins: Mapping[str, str]  # of settings that are not defaults
    environment: Mapping[str, str]  # variables from the setting `env`
    machine: Mapping[str, str]
    variables: Mapping[str, str]  # environment variables that affect training
    num_processes: int
    num_machines: int
    supervised: str | None  # why the launcher keeps running; None: the script replaced it
    job: str  # scheduler job id; empty outside a job
    snapshot: str  # folder of the copy of the code; empty if there is none
    is_rank: bool  # RANK, WORLD_SIZE, ... were set for the script


def begin(path: str, start: Launch, diff_within_s: float = _WITHIN_S) -> dict[str, Any]:
    """Write a run's initial record and return its fields; raise OSError if this fails."""
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
    """Return the variables that affect training, except a scheduler's, with secrets masked."""
    found = {}
    for name, text in sorted(environ.items()):
        if affects_training(name) and not name.startswith(_OF_THE_JOB):
            is_env = name == TABLE["env"].variable
            found[name] = (masked_line(text) if is_env else masked(name, text))[:_VALUE]
    return found


def packages(path: Iterable[str]) -> dict[str, str]:
    """Return installed packages' versions, read from the names of their metadata folders."""
    found: dict[str, str] = {}
    for folder in path:
        with suppress(OSError):
            for entry in os.listdir(folder or "."):
                if entry.endswith((".dist-info", ".egg-info")):
                    name, _, version = entry.rpartition(".")[0].partition("-")
                    found.setdefault(name.lower().replace("_", "-"), version)
    return dict(sorted(found.items()))


def runs_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder of all records, which may not exist."""
    return os.path.join(user_folder("state", environ), "runs")


def new_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return a path for a new run, unique even across containers that share the home folder."""
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"
    return os.path.join(runs_folder(environ), name)


def write(path: str, record: Mapping[str, Any]) -> None:
    """Write the fields of a record, replacing an existing file; raise OSError if this fails."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    text = json.dumps({"format": FORMAT, **record}, separators=(",", ":"))
    write_atomic(os.path.join(path, FILE), text)


def failure_message(error: OSError) -> str:
    """Return the message for a record that could not be written completely."""
    return f"note: cannot record this run: {error.strerror} (--record off disables the record)"


def names_in(folder: str) -> list[str]:
    """Return the names of the runs in a folder, newest last; raise OSError if it is unreadable."""
    if is_absent(folder):
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def prune(folder: str) -> None:
    """Remove the oldest runs beyond the limit; a run that is still active recreates its record."""
    for name in names_in(folder)[:-MAX_RUNS]:
        import shutil

        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


# ------------------------------------------------------------------ git


class Commit(NamedTuple):
    root: str
    commit: str
    diff: str | None  # uncommitted changes; None: git took too long


def copied_commit(code: str) -> Commit | None:
    """Return the commit that the code was copied from; None if the code is not a copy."""
    about = os.path.join(os.path.dirname(code), COPIED_FROM)
    with suppress(OSError, ValueError), open(about, "rb") as file:
        return read(Commit, json.loads(file.read()))
    return None


def read_commit(folder: str, within_s: float = _WITHIN_S) -> Commit | None:
    """Return the commit and the uncommitted diff of a folder's repository, if there is one.

    Secrets in the diff are masked; a long diff is truncated. Each git command may run for at most
    `within_s` seconds.
    """
    here = os.path.realpath(folder)
    while not os.path.lexists(os.path.join(here, ".git")):
        if here == os.path.dirname(here):
            return None
        here = os.path.dirname(here)
    head = git(here, "rev-parse", "HEAD", within_s=within_s)
    if head is None:
        return None
    diff = git(here, "diff", *_PLAIN, "HEAD", within_s=within_s)
    if diff:
        from headway.ipc.secrets import masked_text

        diff = masked_text(diff[:_DIFF_CHARS])
    return Commit(here, head.strip(), diff)


def git(folder: str, *words: str, within_s: float = _WITHIN_S) -> str | None:
    """Return git's output in a folder; None if it fails or takes too long.

    Does not use subprocess, because importing it takes longer than running git.
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
