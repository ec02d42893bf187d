"""What git knows of a run's code: its commit, and what has not been committed."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from contextlib import suppress
from typing import NamedTuple

from headway.contract.typed import read

COPIED_FROM = "commit.json"
"""Has the commit, beside the folder of a job's copy of the code."""
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


def git(folder: str, *words: str, within_s: float = _WITHIN_S) -> str | None:
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
