"""The user's program, the Python that runs it, and the training libraries that can be hooked."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

RUNTIMES = (
    *("accelerate", "transformers.trainer", "deepspeed", "composer", "ignite.distributed"),
    *("lightning", "lightning_fabric", "pytorch_lightning"),
    *("fastai.distributed", "mmengine", "ultralytics"),
)
"""Modules that read the rank variables or ACCELERATE_MIXED_PRECISION themselves."""

_MOST_READ = 2**20  # bytes read of a script


class Hook(NamedTuple):
    """A training library that is hooked when the script imports it."""

    name: str  # for messages
    module: str  # hooked after its import
    installer: str  # Headway's module with the hook


HOOKS = (
    Hook("transformers' Trainer", "transformers.trainer", "headway.integrations.trainer"),
    *(
        Hook("Lightning's Trainer", f"{package}.trainer.trainer", "headway.integrations.lightning")
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
)


class Program(NamedTuple):
    name: str  # a path, or a module's name
    args: tuple[str, ...] = ()
    kind: str = "script"  # script, module, or program (not Python)
    is_stream: bool = False  # a pipe, terminal or descriptor, which only one process can read

    @property
    def is_python(self) -> bool:
        return self.kind != "program"

    @property
    def is_asked_for_help(self) -> bool:
        return not {"-h", "--help"}.isdisjoint(self.args)

    @property
    def path(self) -> str:
        """The path of the program's file; empty for a module."""
        is_file = self.kind != "module" and os.path.isfile(self.name)
        return os.path.abspath(self.name) if is_file else ""

    @property
    def text(self) -> bytes:
        """The script's text; empty if the program is not a script that can be read."""
        if self.kind == "script" and not self.is_stream and self.path:
            with suppress(OSError), open(self.name, "rb") as file:
                return file.read(_MOST_READ)
        return b""

    @property
    def mentions_rank(self) -> bool:
        """Whether a script seems to read RANK, which may be unset without a launcher."""
        return b"'RANK'" in self.text.replace(b'"', b"'")

    def command(self, python: Sequence[str]) -> list[str]:
        dashes = ["--"] if self.name.startswith("-") else []
        before = {"script": [*python, *dashes], "module": [*python, "-m"], "program": []}
        return [*before[self.kind], self.name, *self.args]


def finder_in(path: str) -> Any:
    """Return the module finder for a folder or zip archive; None for any other path."""
    for hook in sys.path_hooks:
        with suppress(ImportError):
            return hook(path)
    return None


def interpreter() -> tuple[str, ...]:
    """Return this Python's path and its flags, such as -O, except those of a shebang line."""
    return (sys.executable, *flags_in(sys.orig_argv))


def flags_in(command: Sequence[str]) -> tuple[str, ...]:
    """Return the interpreter's flags in a command line that runs a module or code, not a script.

    The flags -W and -X take a value; -m or -c is the last flag. Source: the output of `python -h`.
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
