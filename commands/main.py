"""The `headway` command: finds and runs a subcommand, prints errors and returns the exit code.

Only the requested subcommand is imported. HeadwayError is caught only here.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import NoReturn, TextIO

from headway._version import __version__
from headway.errors import Code, ConfigError, HeadwayError, MachineError, suggestion
from headway.ipc.stderr import flush_streams, log

_CANNOT_WRITE = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EFBIG)

_PACKAGES = ("torch", "safetensors")  # some commands do not require them

GROUPS = {
    "start": {
        "launch": "run a training script in one or many processes",
        "estimate": "estimate a script's memory, and list the settings that fit, without a GPU",
        "adopt": "list the Accelerate names that scripts use, and change their imports",
    },
    "watch": {
        "top": "list running launches and their ranks, with the time per phase and the slow rank",
        "stack": "print the stacks of all ranks of a running launch, and the rank that is behind",
    },
    "look back": {
        "runs": "list recorded runs, and compare two of them",
        "why": "show the result of a run, and the changes since the last successful run",
        "logs": "print the output of a run or job, even while it is running",
        "checkpoint": "list, verify, export and remove checkpoints",
        "explain": "explain an error: print its cause, an example and the fix",
    },
    "settings": {
        "config": "ask questions and write this machine's profile; show, change and check profiles"
    },
    "machine": {
        "doctor": "check this machine, and print how to fix each problem",
        "env": "print the facts about this machine, ready to paste into an issue",
        "test": "check this machine with a few seconds of training on all ranks of the plan",
    },
}
"""Help texts of the commands, grouped by the headings of `--help`."""

COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}

_LISTED = "\n".join(
    f"{heading}:\n" + "\n".join(f"  {name:<12}{text}" for name, text in group.items()) + "\n"
    for heading, group in GROUPS.items()
)

HELP = f"""\
usage: headway [--version] [--help] <command> ...

Run one PyTorch training script on any machine.

{_LISTED}
See `headway <command> --help` for details. A first run, with two processes on the CPU:
  headway launch --cpu --num-processes 2 train.py
"""


def run_command() -> NoReturn:
    """Run this process's command line and exit with its exit code.

    A launcher that supervised ranks has imported torch, and skips interpreter finalization, which
    would take a third of a second.
    """
    exit_code = main()
    if "headway.launcher.processes.supervise" in sys.modules:
        flush_streams()
        os._exit(exit_code)
    sys.exit(exit_code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    closed = _open_closed_streams()
    try:
        exit_code = _dispatch(words)
        sys.stdout.flush()
        return exit_code
    except HeadwayError as error:
        _report(error, [sys.stdout] if "stderr" in closed else [sys.stderr, sys.stdout])
        return error.exit_code
    except KeyboardInterrupt:
        log("interrupted")
        return 130
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for the buffered output
        if error.errno != errno.EPIPE:  # a reader such as `head` may stop at any time
            with suppress(OSError):
                print(
                    f"error: the output cannot be written: {error.strerror} [{Code.UNWRITABLE}]",
                    file=sys.stderr,
                )
        return 1


def _report(error: HeadwayError, streams: Iterable[TextIO]) -> None:
    """Print an error to the first writable stream."""
    from headway.commands.tables import escape_unencodable

    flush_streams()
    escape_unencodable()
    for stream in streams:
        with suppress(OSError):
            print(described(error), file=stream, flush=True)
            return


def described(error: HeadwayError) -> str:
    lines = [f"error: {problem}" for problem in error.problems]
    if error.note:
        lines.append(f"note: {error.note}")
    return "\n".join(lines)


def _open_closed_streams() -> set[str]:
    """Open the null device for each closed standard stream (`>&-`) and return their names.

    A script that replaces the launcher does not inherit the null device: its stream stays closed.
    """
    closed = set()
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            closed.add(name)
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd, inheritable=False)
                os.close(opened)
            stream = open(fd, mode, closefd=False, errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, stream)
    return closed


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"headway {__version__}")
        return 0
    if words[0] == "help":
        return _dispatch([*words[1:2], "--help"])
    name = words[0]
    if name not in COMMANDS:
        raise ConfigError(
            f"unknown command {name!r}{suggestion(name, COMMANDS)}",
            where="the command line",
            fix="run `headway --help` to list the commands"
            if not name.endswith(".py")
            else f"run `headway launch {name}`",
            code=Code.COMMAND_LINE,
        )
    if name != "launch":  # the script may inherit the stream
        from headway.commands.tables import escape_unencodable

        escape_unencodable()
    try:
        exit_code: int = _imported(name).main(words[1:])
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        from headway.ipc.paths import installer_of

        raise MachineError(
            f"`headway {name}` requires {error.name}, which is not installed",
            where=f"the environment of {sys.executable}",
            fix=f"run `{installer_of(sys.executable)} {error.name}`",
            code=Code.NOT_INSTALLED,
        ) from None
    return exit_code


def _imported(name: str) -> ModuleType:
    """Import a subcommand without garbage collection, because imported objects are never freed."""
    gc.disable()
    try:
        return import_module(f"headway.commands.{name}")
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation, which the next collection skips
        gc.enable()
