"""The code of a run: what git knows of it, and the copy of it that a job runs.

A copy is a folder with `code`, which holds what git tracks and what it does not ignore, as it was
when the job was submitted, and `snapshot.json`. Nothing is changed in the repository.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from headway.contract.typed import parse, plain, read
from headway.errors import ConfigError, MachineError
from headway.history.launch import Commit

MAX_BYTES = 50 * 2**20
_ABOUT = "snapshot.json"
_SHOWN = 5  # of the largest files
_WITHIN_S = 20.0
_DIFF_CHARS = 200 * 2**10
_CONFIG = ("-c", "core.fsmonitor=false", "-c", "core.bigFileThreshold=1m")  # no diff of larger ones
_PLAIN = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")


class Snapshot(NamedTuple):
    """A copy of code, where it was taken from, and the state of that repository."""

    root: str  # of the repository
    commit: Commit | None
    code: str  # the folder that has the copy

    def original(self, path: str) -> str:
        """Return the path of what a file of the copy was copied from."""
        return path.replace(self.code + os.sep, self.root + os.sep)

    def typed(self, word: str) -> str:
        """Return a word of a command line as it was before the copy was made."""
        before, found, name = word.partition(self.code + os.sep)
        path = os.path.join(self.root, name)
        near = os.path.relpath(path)
        return f"{before}{path if near.startswith(os.pardir) else near}" if found else word


def snapshot_at(code: str) -> Snapshot | None:
    """Return what a copy of code is; None where there is none."""
    about = os.path.join(os.path.dirname(code), _ABOUT)
    with suppress(OSError, ValueError), open(about, "rb") as file:
        return read(Snapshot, parse(file.read()))
    return None


def take(root: str, commit: Commit | None, without: str, into: str) -> str:
    """Copy the code of a repository into a new folder, and return where in it the code is.

    The folder `without` is left out, also if git would not ignore it. Raises ConfigError where
    there is too much.
    """
    import shutil

    names = [name for name in files_of(root) if not _is_within(os.path.join(root, name), without)]
    _refuse_too_much(root, {name: os.lstat(os.path.join(root, name)).st_size for name in names})
    code = os.path.join(into, "code")
    try:
        os.makedirs(code)
        for name in names:
            target = os.path.join(code, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with suppress(FileNotFoundError):  # it has just been removed
                shutil.copy2(os.path.join(root, name), target, follow_symlinks=False)
        with open(os.path.join(into, _ABOUT), "w", encoding="utf-8") as file:
            json.dump(plain(Snapshot(root, commit, code)), file)
    except OSError as error:
        shutil.rmtree(into, ignore_errors=True)
        raise MachineError(
            f"the code could not be copied for the job: {error.strerror}",
            where=error.filename or into,
            fix="free some space, or submit with --set snapshot=off",
        ) from None
    return code


def files_of(root: str) -> Iterator[str]:
    """Yield what git tracks or does not ignore in a repository and its submodules."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
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
            "--set snapshot=off",
        )


def top_of(folder: str) -> str:
    """Return the top folder of the repository that holds a folder; empty for one in none."""
    printed = _git(folder, "rev-parse", "--show-toplevel") if _may_be_tracked(folder) else None
    return (printed or "").removesuffix("\n")


def read_commit(folder: str, within_s: float = _WITHIN_S) -> Commit | None:
    """Return the commit of the repository that holds a folder; None where there is none.

    A secret is masked in the diff, and a long diff is cut; git is given `within_s` for it.
    """
    words = ("rev-parse", "--show-toplevel", "HEAD")
    printed = _git(folder, *words) if _may_be_tracked(folder) else None
    if not printed:
        return None
    from headway.contract.secrets import masked_text

    root, commit = printed.splitlines()
    diff = _git(root, "diff", *_PLAIN, "HEAD", within_s=within_s)
    return Commit(root, commit, None if diff is None else masked_text(diff[:_DIFF_CHARS]))


def _may_be_tracked(folder: str) -> bool:
    """Return whether a folder may be in a repository, without running git."""
    here = os.path.realpath(folder)
    while not os.path.lexists(os.path.join(here, ".git")):
        if here == os.path.dirname(here):
            return False
        here = os.path.dirname(here)
    return True


def _git(folder: str, *words: str, within_s: float = _WITHIN_S) -> str | None:
    """Return what git prints in a folder; None where it fails or takes too long."""
    import subprocess

    command = ["git", "--no-optional-locks", *_CONFIG, "-C", folder, *words]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=within_s, check=False
        )
        if done.returncode == 0:
            return done.stdout.decode(errors="replace")
    return None
