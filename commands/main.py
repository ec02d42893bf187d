"""The `headway` command: finds the subcommand, runs it, prints errors, answers with an exit code.

Only the subcommand that was asked for is imported. Only here is a HeadwayError caught.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from headway._version import __version__
from headway.errors import ConfigError, HeadwayError, did_you_mean

COMMANDS = {
    "config": "look at this machine and write its profile; `config show` lists all settings",
    "launch": "run a training script in one or many processes",
}

HELP = f"""\
usage: headway [--version] [--help] <command> ...

Run one PyTorch training script on any machine.

commands:
{chr(10).join(f"  {name:<9}{text}" for name, text in COMMANDS.items())}

`headway <command> --help` says more. A first run, with two processes on this machine's CPU:
  headway launch --cpu --num-processes 2 train.py
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except HeadwayError as error:
        sys.stdout.flush()
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("headway: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `headway config show | head`
        sys.stderr.close()
        return 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"headway {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        close = did_you_mean(name, COMMANDS)
        raise ConfigError(
            f"{name!r} is no command of headway" + (f"; did you mean {close!r}?" if close else ""),
            where="the command line",
            fix="`headway --help` lists the commands"
            if not name.endswith(".py")
            else f"`headway launch {name}`",
        )
    exit_code: int = import_module(f"headway.commands.{name}").main(words[1:])
    return exit_code
