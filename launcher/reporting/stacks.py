"""Stacks and tracebacks in what Python writes: whose calls they are, and where they stand. Pure."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from itertools import dropwhile
from typing import NamedTuple

_OURS = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
_LIBRARIES = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    _OURS + os.sep,
    "<frozen",
)
_LAUNCHER = os.path.join(_OURS, "launcher") + os.sep
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+),? in (?P<function>.*)')


class Frame(NamedTuple):
    """One call of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]
"""The calls of one thread, the most recent last."""


def users_frame(stack: Stack) -> Frame | None:
    """Return the most recent call in a file that belongs to no library, else the last one."""
    theirs = [frame for frame in stack if not frame.file.startswith(_LIBRARIES)]
    return theirs[-1] if theirs else stack[-1] if stack else None


def parse_stacks(text: str) -> tuple[Stack, ...]:
    """Return the stacks in what faulthandler has written, the main thread's first.

    Left out are the calls of Headway's that come before the script's, and a thread of Headway's.
    Source: Python's library reference, faulthandler: threads from the newest to the oldest, calls
    from the most recent one on.
    """
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            stacks.append([])
        elif stacks and (frame := _frame(line)) is not None:
            stacks[-1].insert(0, frame)
    theirs = [
        the_scripts_own(stack)
        for stack in reversed(stacks)
        if stack and not _is_our_thread(stack[0])
    ]
    return tuple(stack for stack in theirs if stack)


def the_scripts_own(stack: Iterable[Frame]) -> Stack:
    """Return the calls without those of Headway's that come before the script's."""
    return tuple(dropwhile(_is_before_the_script, stack))


def _is_our_thread(first: Frame) -> bool:
    return first.file.startswith(_LAUNCHER) and first.function == "_answer"


def is_cut(text: str) -> bool:
    """Return whether faulthandler left threads out: after 100 it writes three dots alone."""
    return "\n...\n" in text


def is_whole(text: str) -> bool:
    """Return whether stacks end with the main thread's first call, which is always Headway's."""
    return text.endswith("\n") and '"<string>"' in text.splitlines()[-1]


def waits_for_threads(stacks: Sequence[Stack]) -> bool:
    """True where the script is at its end, and Python waits for its threads that are no daemons."""
    main = stacks[0] if stacks else ()
    return any(one.function == "_shutdown" and one.file.endswith("threading.py") for one in main)


def describe_crash(text: str) -> list[str]:
    """Return the stack of the thread that crashed, if faulthandler has written one."""
    _, _, report = text.rpartition("Fatal Python error: ")
    _, found, stack = report.partition("Current thread")
    stacks = parse_stacks(found + stack.partition("\n\n")[0])
    if not stacks:
        return []
    return [f"{report.splitlines()[0]}, most recent call last:", *lines_of(stacks[0])]


def parse_traceback(text: str) -> Stack:
    """Return the calls in a traceback as Python prints it."""
    return tuple(frame for line in text.splitlines() if (frame := _frame(line)) is not None)


def _frame(line: str) -> Frame | None:
    match = _FRAME.match(line)
    if match is None:
        return None
    file, number, function = match.groups()
    return Frame(file, int(number), function)


def _is_before_the_script(frame: Frame) -> bool:
    return frame.file.startswith((_LAUNCHER, "<string>", "<frozen runpy"))


def lines_of(stack: Stack) -> Iterable[str]:
    """Yield the lines of a stack as Python prints it, with those of its source."""
    for frame in stack:
        yield f'  File "{frame.file}", line {frame.line}, in {frame.function}'
        source = linecache.getline(frame.file, frame.line).strip()
        if source:
            yield f"    {source}"
