"""What a run finds when it begins: packages, the code and its commit, variables, data."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from headway.contract.secrets import is_secret, masked, masked_line, masked_text
from headway.history.record import MAX_TEXT, Surroundings
from headway.history.snapshot import Snapshot
from headway.machine.host import TRAINING_VARIABLES
from headway.settings.profile_files import PROJECT_FILE
from headway.settings.table import TABLE

_MOST_FILES = 300  # that are digested, of each kind; names of a folder, untracked files
_SOURCE_BYTES = 2**20  # of one file; a larger one was not written by hand
_VALUE = 400  # characters of a variable
_OF_A_SESSION = re.compile(
    r"(_|PWD|OLDPWD|SHLVL|TERM|TERMINFO|COLUMNS|LINES|LS_COLORS|DISPLAY|TMPDIR|TTY|WINDOWID|MAIL"
    r"|HOSTNAME|PROMPT_COMMAND|PS1|PS2|EDITOR|PAGER|VISUAL|INVOCATION_ID|JOURNAL_STREAM|STY"
    r"|WINDOW|TMUX)$|.*_(PID|SOCK|SOCKET)$"
    r"|(HEADWAY_RUN|TERM_|TMUX_|SSH_|XDG_|DBUS_|VSCODE_|GPG_|LESS|SLURM|SBATCH|SRUN|PMI|OMPI_|PYTEST_)"
)
_CONFIGS = (".yaml", ".yml", ".toml", ".ini", ".cfg")  # JSON is rather what a run wrote
_SKIPPED = ("__pycache__", "node_modules", "site-packages", "headway-jobs")


def variables_of(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that affect training, and a short digest of each other one.

    Secrets are masked in the first, and left out of the second, as is what belongs to a session.
    """
    told, others = {}, {}
    for name, text in sorted(environ.items()):
        if _OF_A_SESSION.match(name):
            continue
        if name == TABLE["env"].variable:
            told[name] = masked_line(text)[:_VALUE]
        elif TRAINING_VARIABLES.match(name):
            told[name] = masked(name, text)[:_VALUE]
        elif not is_secret(name):
            others[name] = hashlib.blake2s(text.encode(errors="replace"), digest_size=4).hexdigest()
    return told, others


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


def surroundings_of(
    script: str, arguments: Sequence[str], copy: Snapshot | None = None
) -> Surroundings:
    """Return what a run of this script with these arguments finds; those of a copy as without."""
    text = masked_text(_text_of(script))
    return Surroundings(
        packages=packages(sys.path),
        sources=_digests_below(os.path.dirname(script), arguments) if script else {},
        text=text if len(text) <= MAX_TEXT else "",
        inputs={
            copy.typed(word) if copy is not None else word: found
            for word in _paths_in(arguments)
            if (found := _input(word, copy.original(word) if copy is not None else word))
        },
    )


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


def _digests_below(folder: str, arguments: Sequence[str]) -> dict[str, str]:
    """Return a digest of each Python file and each configuration in a folder and below.

    Environments, hidden folders, Headway's own profile and what arguments name are left out.
    """
    left_out = {os.path.join(folder, PROJECT_FILE), *map(os.path.abspath, _paths_in(arguments))}
    found: dict[str, str] = {}
    left = dict.fromkeys((True, False), _MOST_FILES)
    for path in _paths_below(folder):
        is_source = path.endswith(".py")
        if path in left_out or not left[is_source]:
            continue
        with suppress(OSError), open(path, "rb") as file:
            data = file.read(_SOURCE_BYTES)
            found[os.path.relpath(path, folder)] = hashlib.blake2s(data, digest_size=8).hexdigest()
            left[is_source] -= 1
            if not any(left.values()):
                break
    return found


def _paths_below(folder: str) -> Iterator[str]:
    for where, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".")
            and name not in _SKIPPED
            and not os.path.exists(os.path.join(where, name, "pyvenv.cfg"))
        ]
        for name in sorted(files):
            path = os.path.join(where, name)
            if name.endswith((".py", *_CONFIGS)) and os.path.isfile(path):  # and no named pipe
                yield path


def _text_of(script: str) -> str:
    with suppress(OSError, ValueError):
        if os.path.isfile(script):
            with open(script, encoding="utf-8") as file:
                return file.read(MAX_TEXT + 1)
    return ""


def _paths_in(arguments: Sequence[str]) -> Iterator[str]:
    """Yield what may be a path: a word, or what follows its equals sign."""
    for word in arguments[:_MOST_FILES]:
        value = word.partition("=")[2] if word.startswith("-") else word
        if value and len(value) < 4096:
            yield value


def _input(word: str, name: str) -> str:
    """Return what a path leads to, which is a copy of what `name` is; empty: nothing."""
    with suppress(OSError, ValueError):
        status = os.stat(word)
        real, told = os.path.realpath(word), os.path.realpath(name)
        if os.path.isdir(real):
            names = os.listdir(real)
            size = 0
            for name in names[: _MOST_FILES * 10]:
                with suppress(OSError):
                    size += os.lstat(os.path.join(real, name)).st_size
            return f"{told}: a folder of {len(names)} entries, {size} bytes"
        if os.path.isfile(real):
            digest = ""
            if status.st_size <= _SOURCE_BYTES:
                with open(real, "rb") as file:
                    digest = ", " + hashlib.blake2s(file.read(), digest_size=8).hexdigest()
            return f"{told}: {status.st_size} bytes{digest}"
    return ""
