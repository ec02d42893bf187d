"""The code of a run: what git knows of it, and the copy of it that a job runs.

A copy is a folder with `code`, which holds what git tracks and what it does not ignore, as it was
when the job was submitted, and the commit in `commit.json`. The repository is not changed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from headway.contract.typed import parse, plain, read
from headway.errors import ConfigError, MachineError

MAX_BYTES = 50 * 2**20
_ABOUT = "commit.json"
_CHUNK = 2**16
_WITHIN_S = 20.0
_DIFF_CHARS = 200 * 2**10
_CONFIG = ("-c", "core.fsmonitor=false", "-c", "core.bigFileThreshold=1m")  # no diff of larger ones
_PLAIN = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")


class Commit(NamedTuple):
    root: str
    commit: str
    diff: str | None  # of the files against the commit; None: git took too long


def copied_commit(code: str) -> Commit | None:
    """Return the commit from which a copy of code was made; None if it is not a copy."""
    about = os.path.join(os.path.dirname(code), _ABOUT)
    with suppress(OSError, ValueError), open(about, "rb") as file:
        return read(Commit, parse(file.read()))
    return None


def take(commit: Commit, without: str, into: str) -> str:
    """Copy the code of a repository into a new folder, and return its path there.

    The folder `without` is skipped, even if git does not ignore it. Raises ConfigError if the code
    is too large.
    """
    import shutil

    root = commit.root
    left_out = os.path.relpath(without, root) + os.sep
    sizes = {
        name: os.lstat(os.path.join(root, name)).st_size
        for name in files_of(root)
        if not name.startswith(left_out)
    }
    if (total := sum(sizes.values())) > MAX_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise ConfigError(
            f"the code of the job would be {total >> 20} MiB in {len(sizes)} files; a snapshot "
            f"takes {MAX_BYTES >> 20}. The largest: {largest} ({sizes[largest] / 2**20:.1f} MiB)",
            where=root,
            fix="name what is no code in .gitignore, or run what is there when the job starts: "
            "--set snapshot=off",
        )
    code = os.path.join(into, "code")
    try:
        os.makedirs(code)
        for name in sizes:
            target = os.path.join(code, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with suppress(FileNotFoundError):  # it has just been removed
                shutil.copy2(os.path.join(root, name), target, follow_symlinks=False)
        with open(os.path.join(into, _ABOUT), "w", encoding="utf-8") as file:
            json.dump(plain(commit), file)
    except OSError as error:
        shutil.rmtree(into, ignore_errors=True)
        raise MachineError(
            f"the code could not be copied for the job: {error.strerror}",
            where=error.filename or into,
            fix="free some space, or submit with --set snapshot=off",
        ) from None
    return code


def files_of(root: str) -> Sequence[str]:
    """Return the files that git tracks or does not ignore, and those tracked in submodules."""
    words = ("ls-files", "-z")
    tracked = _git(root, *words, "--recurse-submodules") or ""
    others = _git(root, *words, "--others", "--exclude-standard") or ""
    names = dict.fromkeys((tracked + others).split("\0")[:-1])
    paths = {name: os.path.join(root, name) for name in names}
    return [name for name, at in paths.items() if os.path.islink(at) or os.path.isfile(at)]


def read_commit(folder: str, within_s: float = _WITHIN_S) -> Commit | None:
    """Return the commit of the repository that holds a folder; None without one.

    Secrets in the diff are masked, and a long diff is cut; git may take `within_s`.
    """
    here = os.path.realpath(folder)
    while not os.path.lexists(os.path.join(here, ".git")):
        if here == os.path.dirname(here):
            return None
        here = os.path.dirname(here)
    head = _head(here) or _git(here, "rev-parse", "HEAD", within_s=within_s)
    if head is None:
        return None
    diff = _git(here, "diff", *_PLAIN, "HEAD", within_s=within_s)
    if diff:
        from headway.contract.secrets import masked_text

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


def _git(folder: str, *words: str, within_s: float = _WITHIN_S) -> str | None:
    """Return what git prints in a folder; None if it fails or takes too long.

    Does not use subprocess, whose import takes longer than git.
    """
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
