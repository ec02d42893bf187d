"""Asks git about the repository that holds a folder; nothing is changed there."""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import suppress
from typing import Any

from headway.contract.secrets import masked_text
from headway.history.record import Commit

_GIT_WITHIN_S = 20.0
_DIFF_CHARS = 200 * 2**10
_MOST_SAID = 2**24  # bytes of what git prints
_NO_TEXT = "\ufffd"  # in place of what is no UTF-8
_FOR_APPLY = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
_MOST_UNTRACKED = 300  # files that git does not know


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
