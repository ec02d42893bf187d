"""Records the step statistics and the exit of a single process that replaced its launcher.

If the launcher's code runs the script, that code records the exit. Otherwise, the Accelerator does
so at interpreter exit. It knows the exit code only if the script raised an exception, called
`end_training()`, or saved and stopped on request.
"""

from __future__ import annotations

import atexit
import os
import sys
from functools import cache

from headway.errors import ConfigError
from headway.history import store
from headway.history.attempts import Attempts
from headway.history.record import MAX_TEXT, RunEnd, StatsSeries, read_record
from headway.ipc.progress import Progress
from headway.ipc.records import OutputPath, StepStats
from headway.ipc.run_contract import RECORD_VARIABLE, epoch_time
from headway.ipc.secrets import masked_text, secrets_among
from headway.ipc.signals import shell_exit_code
from headway.ipc.stderr import log
from headway.ipc.typed import plain


class _Process:
    """State for this process's record."""

    def __init__(self) -> None:
        self.series = StatsSeries()
        self.attempts = Attempts(0.0)
        self.exit_code: int | None = None  # None: unknown
        self.has_ended = False


_process = _Process()


def record_folder() -> str:
    """Return the folder of the record that this process writes; empty if there is none.

    A child process inherits RECORD_VARIABLE, but writes no record.
    """
    pid, _, folder = os.environ.get(RECORD_VARIABLE, "").partition(":")
    return folder if pid == str(os.getpid()) else ""


@cache
def start(progress: Progress) -> None:
    """Record the step statistics and the exit of this process, unless a launcher records them."""
    if record_folder():
        atexit.register(_record_python_exit, progress)
        progress.report_to(_note)


def _note(stats: StepStats) -> None:
    _process.series.note(0, stats)
    _process.attempts.note(0, stats, epoch_time())


def mark_ended(exit_code: int = 0) -> None:
    """Record this exit code at interpreter exit, unless an error follows."""
    _process.exit_code = exit_code


def _record_python_exit(progress: Progress) -> None:
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        import traceback

        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        record_exit(code, "".join(traceback.format_exception(error)), progress)
    else:
        record_exit(_process.exit_code, "", progress)


def record_exit(code: int | None, report: str, progress: Progress) -> None:
    """Record this process's exit once; `code` is negative for a signal, and None if unknown."""
    folder = record_folder()
    if not folder or _process.has_ended:
        return
    _process.has_ended = True
    exit_code = None if code is None else shell_exit_code(code)
    progress.finish()
    _process.attempts.end(progress.step, epoch_time())
    report = masked_text(report[-MAX_TEXT:], secrets_among(os.environ, sys.orig_argv))
    try:
        record = read_record(folder)
        record = record._replace(
            kept=tuple(OutputPath(what, path) for what, path in progress.output_paths.items()),
            ranks=_process.series.ranks({}),
            attempts=tuple(
                row._replace(began_at=record.start.began_at) for row in _process.attempts.rows
            ),
            end=RunEnd(epoch_time(), exit_code, report),
        )
        store.write(folder, plain(record))
    except OSError as error:
        log(store.failure_message(error))
    except ConfigError as error:
        log(f"note: {error.problems[0].what}")
