"""A copy of code: of a job, as it was when the job was submitted, or of a run's commit.

A folder with `code`, which holds what git tracks and what it does not ignore, and `snapshot.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from headway.contract.typed import parse, plain, read
from headway.errors import ConfigError, MachineError
from headway.history.record import Commit
from headway.history.repository import git

MAX_BYTES = 50 * 2**20
_CODE, _ABOUT = "code", "snapshot.json"
_SHOWN = 5  # of the largest files
_ABOUT_BYTES = 2**20


class Snapshot(NamedTuple):
    """A copy of code, where it was taken from, and the state of that repository."""

    root: str  # of the repository
    commit: Commit | None
    code: str  # the folder that has the copy

    def original(self, word: str) -> str:
        """Return a word with the path of what a file of the copy was copied from."""
        return word.replace(self.code + os.sep, self.root + os.sep)

    def typed(self, word: str) -> str:
        """Return a word of a command line as it was before the copy was made, as far as known."""
        before, found, name = word.partition(self.code + os.sep)
        path = os.path.join(self.root, name)
        near = os.path.relpath(path)
        return f"{before}{path if near.startswith(os.pardir) else near}" if found else word

    def copy(self, path: str) -> str:
        """Return the path of the copy of a file."""
        return os.path.join(self.code, os.path.relpath(path, self.root))

    def outside(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return variables without what lets Python find modules in the copy."""
        kept = {name: text for name, text in environ.items() if name != "PYTHONSAFEPATH"}
        folders = kept.pop("PYTHONPATH", "").split(os.pathsep)
        others = [one for one in folders if one and not _is_within(one, self.code)]
        return {**kept, "PYTHONPATH": os.pathsep.join(others)} if others else kept

    def write(self) -> None:
        """Say beside the copy what it is."""
        with open(os.path.join(os.path.dirname(self.code), _ABOUT), "w", encoding="utf-8") as file:
            json.dump(plain(self), file)


def code_in(folder: str) -> str:
    """Return where in a folder a copy of code is."""
    return os.path.join(folder, _CODE)


def snapshot_of(folder: str) -> Snapshot | None:
    """Return the snapshot that a folder is in; None for one that is in none."""
    here = os.path.abspath(folder) if folder else os.sep
    while here != (above := os.path.dirname(here)):
        if os.path.basename(here) == _CODE:
            with (
                suppress(OSError, ValueError, RecursionError),
                open(os.path.join(above, _ABOUT), "rb") as file,
            ):
                return read(Snapshot, parse(file.read(_ABOUT_BYTES)))._replace(code=here)
        here = above
    return None


def take(root: str, commit: Commit | None, without: str, into: str) -> str:
    """Copy the code of a repository into a new folder, and return where in it the code is.

    The folder `without` is left out, also if git would not ignore it. Raises ConfigError where
    there is too much.
    """
    names = [name for name in files_of(root) if not _is_within(os.path.join(root, name), without)]
    sizes = {name: os.lstat(os.path.join(root, name)).st_size for name in names}
    _refuse_too_much(root, sizes)
    code = code_in(into)
    try:
        os.makedirs(code)
        for name in names:
            target = os.path.join(code, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with suppress(FileNotFoundError):  # it has just been removed
                shutil.copy2(os.path.join(root, name), target, follow_symlinks=False)
        Snapshot(root, commit, code).write()
    except OSError as error:
        shutil.rmtree(into, ignore_errors=True)
        raise MachineError(
            f"the code could not be copied for the job: {error.strerror}",
            where=error.filename or into,
            fix="free some space, or submit with --snapshot off",
        ) from None
    return code


def files_of(root: str) -> Iterator[str]:
    """Yield what git tracks or does not ignore in a repository and its submodules."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in dict.fromkeys(listed.split("\0")[:-1]):
        path = os.path.join(root, name)
        if os.path.isdir(path) and not os.path.islink(path):
            if os.path.lexists(os.path.join(path, ".git")):  # a submodule
                yield from (os.path.join(name, one) for one in files_of(path))
        elif os.path.lexists(path):
            yield name


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _refuse_too_much(root: str, sizes: dict[str, int]) -> None:
    total = sum(sizes.values())
    if total > MAX_BYTES:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_SHOWN]
        each = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in largest)
        raise ConfigError(
            f"the code of the job would be {total / 2**20:.0f} MiB in {len(sizes)} files; a "
            f"snapshot takes {MAX_BYTES >> 20}. The largest: {each}",
            where=root,
            fix="name what is no code in .gitignore, or run what is there when the job starts: "
            "--snapshot off",
        )
