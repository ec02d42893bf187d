"""Monkey-patching of other packages, and the line of user code that calls them.

That line is the innermost one outside torch, the standard library and installed packages.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

_PACKAGE = f"{Path(os.path.abspath(__file__)).parents[2]}{os.sep}"
_LIBRARIES = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_TRANSPARENT = (os.path.dirname(os.path.abspath(__file__)), os.path.dirname(torch.__file__))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def replace(owner: Any, name: str, value: Any) -> None:
    """Set an existing attribute; raise AttributeError if a newer torch has removed it."""
    getattr(owner, name)
    setattr(owner, name, value)


def replace_everywhere(name: str, value: Any) -> None:
    """Replace an attribute in every module that has it; raise AttributeError if none has it."""
    modules = [mod for mod in [*sys.modules.values()] if name in getattr(mod, "__dict__", ())]
    if not modules:
        raise AttributeError(name)
    for module in modules:
        setattr(module, name, value)


def nothing(*_: Any, **__: Any) -> None:
    pass


def line_now() -> str:
    """Return the current line of user code, such as `train.py, line 12`; empty if there is none."""
    frames = traceback.walk_stack(sys._getframe(1))
    return _first((frame.f_code.co_filename, line) for frame, line in frames)


def is_read_by_user() -> bool:
    """Return whether user code is the caller, directly or through torch."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
    caller = next((file for file in files if not file.startswith(_TRANSPARENT)), "<")
    return _is_of_user(caller)


def line_of(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return _shown(error.filename, error.lineno or 0)
    steps = reversed([*traceback.walk_tb(error.__traceback__)])
    return _first((frame.f_code.co_filename, line) for frame, line in steps)


def line_in(text: str) -> str:
    """Return the line of user code in the output of Python's faulthandler."""
    found = re.findall(r'^  File "(.+?)", line (\d+)', text, re.MULTILINE)
    return _first((file, int(line)) for file, line in found)


def _first(places: Iterable[tuple[str, int]]) -> str:
    return next((_shown(file, line) for file, line in places if _is_of_user(file)), "")


@cache
def _is_of_user(file: str) -> bool:
    if file.startswith(("<", _PACKAGE)) or any(folder in file for folder in _INSTALLED):
        return False
    return not os.path.realpath(file).startswith(_LIBRARIES)


def _shown(file: str, line: int) -> str:
    return f"{os.path.relpath(file)}, line {line}"
