"""The record of a single process that has replaced its launcher: it tells itself how it ends.

Where the launcher's code runs the script, that says so; else the Accelerator does when Python ends.
"""

from __future__ import annotations

import atexit
import dis
import os
import sys
import threading
import time
from functools import partial
from types import FrameType

from headway.contract.notes import say
from headway.contract.progress import Progress
from headway.contract.records import Kept
from headway.contract.run import RECORD_VARIABLE
from headway.contract.signals import shell_code
from headway.history import store
from headway.history.record import MAX_TEXT, End, Row, Series, lost

_WITHIN_S = 1.0

series = Series()
"""The figures of this process, for its record."""


class _Process:
    """This process, as far as its record has to know it."""

    def __init__(self) -> None:
        self.main: FrameType | None = None  # of the script; known once an Accelerator was made
        self.error: object = None  # the last unhandled one before that
        self.has_trained = False
        self.has_told = False


_process = _Process()


def path() -> str:
    """Return the folder of the record that this process writes; empty for none.

    A process that the script has started inherits the variable, and not the task.
    """
    pid, _, folder = os.environ.get(RECORD_VARIABLE, "").partition(":")
    return folder if pid == str(os.getpid()) else ""


def join(progress: Progress) -> None:
    """Record how this process ends, if it has to, and the figures of its steps."""
    if _process.main is not None or not path():
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    _process.main = frame
    _process.error = getattr(sys, "last_value", None)
    atexit.register(_end_of_python, progress)
    progress.report_to(partial(series.note, 0))


def note_end_of_training() -> None:
    """Note that the training has ended by its own word: a sys.exit after it is no failure."""
    _process.has_trained = True


def _end_of_python(progress: Progress) -> None:
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and error is not _process.error:
        import traceback

        is_interrupt = isinstance(error, KeyboardInterrupt)
        end(130 if is_interrupt else 1, "".join(traceback.format_exception(error)), progress)
    else:
        end(0 if _process.has_trained or _has_returned(_process.main) else None, "", progress)


def _has_returned(frame: FrameType | None) -> bool:
    """Return whether a frame has come to its end, and was not left by an exception: sys.exit."""
    if frame is None or frame.f_lasti < 0:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")


def end(code: int | None, report: str, progress: Progress) -> None:
    """Record how this process ends, once; a folder that does not answer is not waited for.

    The exit code is negative for a signal, and None if it is not known.
    """
    folder = path()
    if not folder or _process.has_told:
        return
    _process.has_told = True
    exit_code = None if code is None else shell_code(code)
    said = End(time.time(), exit_code, _masked(report), progress.step)
    problem: list[OSError] = []

    def write() -> None:
        try:
            store.create(folder)
            if rows := series.rows():
                store.replace_figures(folder, [Row(rank, one) for rank, one in rows])
            for what, path in progress.kept.items():
                store.append(folder, Kept(what, path))
            store.append(folder, said)
        except OSError as error:
            problem.append(error)

    writing = threading.Thread(target=write, name="headway-record", daemon=True)
    try:
        writing.start()
        writing.join(_WITHIN_S)
    except RuntimeError:  # at its end, Python 3.12 starts no more threads
        write()
    for error in problem:
        say(lost(error))


def _masked(report: str) -> str:
    if not report:
        return ""
    from headway.contract.secrets import masked_output, secrets_among

    return masked_output(report[-MAX_TEXT:], secrets_among(os.environ, sys.orig_argv))
