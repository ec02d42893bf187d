"""Parses Python's stacks and tracebacks, and finds the user's frames in them.

On Linux, also reads the state of a process's main thread from /proc.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import dropwhile
from typing import NamedTuple

from headway.ipc.records import Frame
from headway.ipc.stderr import shown
from headway.launcher.diagnosis import torch_messages as texts

PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")) + os.sep
_LIBRARIES = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    PACKAGE,
    "<frozen",
)
_PACKAGE_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_LAUNCHER = os.path.join(PACKAGE, "launcher") + os.sep
BEFORE_SCRIPT = (_LAUNCHER, texts.CODE_OF_DASH_C, "<frozen runpy")
"""Prefixes of the files whose calls precede those of the script."""

_FRAME = re.compile(texts.STACK_FRAME)

Stack = tuple[Frame, ...]
"""The calls of one thread, most recent call last."""


def user_frame(stack: Stack) -> Frame | None:
    """Return the most recent call outside of libraries; if there is none, the most recent call."""
    users = [frame for frame in stack if not is_in_library(frame.file)]
    return users[-1] if users else stack[-1] if stack else None


def is_in_library(file: str) -> bool:
    # user site-packages and folders in .pth files are outside of this Python's folders
    return file.startswith(_LIBRARIES) or any(folder in file for folder in _PACKAGE_FOLDERS)


def user_stacks(stacks: Iterable[Sequence[Frame]]) -> tuple[Stack, ...]:
    """Remove the launcher's threads, and the launcher's calls that precede those of the script."""
    users = [
        tuple(dropwhile(lambda frame: frame.file.startswith(BEFORE_SCRIPT), stack))
        for stack in stacks
        if stack and not stack[0].file.startswith(_LAUNCHER)  # the thread of rank_monitor
    ]
    return tuple(stack for stack in users if stack)


def is_joining_threads(stacks: Sequence[Stack]) -> bool:
    """Return whether the script has finished, and Python is joining its non-daemon threads."""
    file, function = texts.JOINING_THREADS
    main = stacks[0] if stacks else ()
    return any(frame.function == function and frame.file.endswith(file) for frame in main)


def describe_crash(lines: Sequence[str]) -> list[str]:
    """Return the crashed thread's stack if faulthandler wrote it at the end of `lines`.

    The order is reversed, because faulthandler writes the most recent call first.
    """
    _, _, report = "\n".join(lines).rpartition(texts.FATAL_ERROR)
    _, found, calls = report.rpartition(texts.CRASHED_THREAD)[2].partition(texts.STACK_HEADER)
    stacks = user_stacks([parse_traceback(calls.partition("\n\n")[0])[::-1]])
    if not found or not stacks:
        return []
    return [f"{report.splitlines()[0]}, most recent call last:", *format_stack(stacks[0])]


def parse_traceback(text: str) -> Stack:
    found = filter(None, map(_FRAME.match, text.splitlines()))
    return tuple(Frame(call["file"], int(call["line"]), call["function"]) for call in found)


def format_stack(stack: Stack) -> Iterable[str]:
    for frame in stack:
        yield shown(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        source = linecache.getline(frame.file, frame.line).strip()
        if source:
            yield f"    {source}"


class ProcessState(NamedTuple):
    letter: str = ""  # as in ps(1); empty: unknown
    waits_in: str = ""  # a kernel function; empty: none, or unknown

    @property
    def is_stopped(self) -> bool:
        return self.letter in texts.STOPPED_STATES

    def __str__(self) -> str:
        place = f", in the kernel's {self.waits_in}" if self.waits_in else ""
        return texts.STATES.get(self.letter, "in an unknown state") + place


def read_state(pid: int) -> ProcessState:
    letter = waits_in = ""
    with suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
        waits_in = file.read().strip()
    with suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        rows = dict(line.split(":", 1) for line in file)
        letter = rows[texts.STATE].strip()[:1]
    return ProcessState(letter, "" if waits_in == "0" else waits_in)
