"""The code of a run: what git says of it, and copies, of a job or of a run's commit.

A copy is a folder with `code`, which holds what git tracks and what it does not ignore, as it was
when the job was submitted, and `snapshot.json`. Nothing is changed in the repository.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from headway.contract.secrets import masked_text
from headway.contract.typed import parse, plain, read
from headway.errors import ConfigError, MachineError
from headway.history.record import Commit

MAX_BYTES = 50 * 2**20
_CODE, _ABOUT = "code", "snapshot.json"
_SHOWN = 5  # of the largest files
_ABOUT_BYTES = 2**20
_GIT_WITHIN_S = 20.0
_DIFF_CHARS = 200 * 2**10
_MOST_SAID = 2**24  # bytes of what git prints
_NO_TEXT = "\ufffd"  # in place of what is no UTF-8
_FOR_APPLY = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
_MOST_UNTRACKED = 300  # files that git does not know


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


def top_of(folder: str) -> str:
    """Return the top folder of the repository that holds a folder; empty for one in none."""
    if not _is_below_repository(folder):
        return ""
    return git(folder, "rev-parse", "--show-toplevel").removesuffix("\n")


def read_commit(folder: str) -> Commit | None:
    """Return the commit of the repository that holds a folder; None where git does not say."""
    root = top_of(folder)
    commit = git(folder, "rev-parse", "--verify", "--quiet", "HEAD").strip()
    if not root or not commit:
        return None
    diff = git(root, "diff", *_FOR_APPLY, "HEAD")
    kept = masked_text(diff[:_DIFF_CHARS])
    untracked = git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0")[:-1]
    is_whole = kept == diff and _NO_TEXT not in diff
    return Commit(root, commit, kept, is_whole, tuple(untracked[:_MOST_UNTRACKED]))


def git(folder: str, *words: str) -> str:
    """Return what git says in a folder, the beginning at least; empty where it fails."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", folder, *words]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with (
        suppress(OSError),
        subprocess.Popen(command, stdout=subprocess.PIPE, **quiet) as asked,
    ):
        late = threading.Timer(_GIT_WITHIN_S, asked.kill)
        late.start()
        assert asked.stdout is not None
        said: bytes = asked.stdout.read(_MOST_SAID)
        is_cut = len(said) == _MOST_SAID
        asked.kill() if is_cut else asked.wait()
        late.cancel()
        late.join()
        if is_cut or asked.returncode == 0:
            return said.decode(errors="replace")
    return ""


def _is_below_repository(folder: str) -> bool:
    """Return whether there may be a repository, without running git."""
    here = os.path.realpath(folder)
    while not os.path.lexists(os.path.join(here, ".git")):
        if here == os.path.dirname(here):
            return False
        here = os.path.dirname(here)
    return True
