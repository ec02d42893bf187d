"""Running a command of `headway` in this process."""

from __future__ import annotations

import contextlib
import io

from headway.commands.main import main


def run(*words: str) -> tuple[int, str]:
    """Return the exit code and all that is printed; a traceback would be an exception here."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        return main(words), out.getvalue() + err.getvalue()
