"""Which line of the user's own code is being run: not torch's, Python's or a package's."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

_PACKAGE = f"{Path(os.path.abspath(__file__)).parents[2]}{os.sep}"
_OTHERS = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_of_user(file: str) -> bool:
    """Return whether a file of code is the user's own."""
    if file.startswith(("<", _PACKAGE)) or any(one in file for one in _INSTALLED):
        return False
    return not os.path.realpath(file).startswith(_OTHERS)


def line_now() -> str:
    """Return the innermost line of the user's that is being run, such as `train.py, line 12`."""
    return _first(_outwards(sys._getframe(1)))


def line_of(error: BaseException) -> str:
    """Return the innermost line of the user's that an exception went through."""
    if isinstance(error, SyntaxError) and error.filename:
        return _shown(error.filename, error.lineno or 0)
    steps = reversed([*traceback.walk_tb(error.__traceback__)])
    return _first((frame.f_code.co_filename, line) for frame, line in steps)


def line_in(text: str) -> str:
    """Return the innermost line of the user's in the stacks that Python's faulthandler prints."""
    found = re.findall(r'^  File "(.+?)", line (\d+)', text, re.MULTILINE)
    return _first((file, int(line)) for file, line in found)


def _first(places: Iterable[tuple[str, int]]) -> str:
    return next((_shown(file, line) for file, line in places if is_of_user(file)), "")


def _outwards(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _shown(file: str, line: int) -> str:
    return f"{os.path.relpath(file)}, line {line}"
