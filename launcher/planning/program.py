"""The user's program, and the Python that runs it: this one, with the flags that it was given."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple


class Program(NamedTuple):
    """What the user wants to run, and the arguments that are the program's own."""

    name: str  # a path, or a module's name
    args: tuple[str, ...] = ()
    kind: str = "script"  # script, module, or program for what is no Python

    def command(self, python: Sequence[str]) -> list[str]:
        """Return the argv that runs it."""
        dashes = ["--"] if self.name.startswith("-") else []
        before = {"script": [*python, *dashes], "module": [*python, "-m"], "program": []}
        return [*before[self.kind], self.name, *self.args]


def interpreter() -> tuple[str, ...]:
    """Return this Python, and its own flags: -O and -X dev of `python -O -X dev -m headway`.

    The flags in the first line of an installed `headway` are its installer's, and stay there.
    """
    return (sys.executable, *flags_in(sys.orig_argv))


def flags_in(command: Sequence[str]) -> tuple[str, ...]:
    """Return Python's own flags in a command line that runs a module or code, one by one.

    Source: the usage of `python --help`; -W and -X have values, and -m and -c end the flags.
    """
    flags: list[str] = []
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word == "-":  # a script's name
            return ()
        if word.startswith("--"):
            flags += [word, next(words, "")]
            continue
        for index, letter in enumerate(word[1:], 2):
            if letter in "mc":
                return tuple(flags)
            if letter in "WX":
                flags += [f"-{letter}", word[index:] or next(words, "")]
                break
            flags.append(f"-{letter}")
    return ()
