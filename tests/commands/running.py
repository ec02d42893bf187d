"""Running a command of `headway`, in this process or in one of its own; what it has written."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from headway.commands.main import main
from headway.ipc.origin import Layer
from headway.settings.profile import choose_profile, read_profile
from headway.settings.setting import Raw
from tests.distributed.launching import environment


def run(*words: str, **variables: str) -> tuple[int, str]:
    """Return the exit code and all that is printed; a traceback would be an exception here.

    Args:
        variables: of the environment, beside those of the test.
    """
    environ = patch.dict(os.environ, variables)
    with environ, redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
        return main(words), printed.getvalue()


def python(
    *words: str, given: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python with these words, where `headway` is found; `given` is its input."""
    return subprocess.run(
        [sys.executable, *words],
        input=given,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
    )


def profile(path: str | None = None) -> dict[str, Raw]:
    """Return what a profile of this user says: that at the path, or the one in use."""
    entries = read_profile(path or choose_profile().path, Layer.USER_PROFILE)
    return {name: entry.raw for name, entry in entries.items()}
