"""`headway completion bash|zsh|fish`: print what a shell needs to complete our command lines.

shtab writes the script, from a parser of argparse that has the flags of all commands.
"""

from __future__ import annotations

from argparse import REMAINDER, Action, ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any, NamedTuple

from headway.commands.checkpoint import ACTIONS
from headway.commands.config import SUBCOMMANDS
from headway.commands.config import main as config
from headway.commands.flags import HelpShown, Parser
from headway.commands.main import COMMANDS
from headway.errors import ConfigError
from headway.settings.table import TABLE

SHELLS = ("bash", "zsh", "fish")

Complete = Mapping[str, object]
"""What completes a word: shtab's name for it in each shell."""


class Positional(NamedTuple):
    """One word of a command, or several, that are no flags."""

    name: str
    choices: Sequence[str] | None = None
    complete: str = ""  # a key of `_completers`
    nargs: str | None = None


_FILE = Positional("file", complete="FILE")

POSITIONALS: Mapping[str, Sequence[Positional]] = {
    "adopt": (Positional("script", complete="SCRIPT", nargs="*"),),
    "checkpoint": (Positional("action", ACTIONS), _FILE._replace(nargs="*")),
    "completion": (Positional("shell", SHELLS),),
    "launch": (
        Positional("script", complete="SCRIPT"),
        Positional("arguments", complete="FILE", nargs=REMAINDER),
    ),
    "config import": (_FILE,),
    "config unset": (Positional("key", tuple(TABLE), nargs="*"),),
    "config validate": (_FILE._replace(nargs="*"),),
}


def main(argv: Sequence[str]) -> int:
    """Run `headway completion` with these words and return the exit code."""
    parser = Parser(
        "completion",
        "Print the completion script of a shell; see the guide for where to put it.",
        usage=f"headway completion {'|'.join(SHELLS)}",
    )
    _, words = parser.parse_words(argv)
    if len(words) != 1 or words[0] not in SHELLS:
        parser.error(f"one of {', '.join(SHELLS)} is required")
    try:
        import shtab
    except ImportError:
        raise ConfigError(
            "shtab, which writes completion scripts, is not installed",
            where="this Python",
            fix="`pip install 'headway[completion]'`",
        ) from None
    print(shtab.complete(all_flags(), words[0]))
    return 0


def all_flags() -> ArgumentParser:
    """Return a parser of argparse that has every command with its flags."""
    completers = _completers()
    root = ArgumentParser(prog="headway")
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers()
    for name, text in COMMANDS.items():
        run = import_module(f"headway.commands.{name}").main
        command = commands.add_parser(name, help=text)
        _fill(command, name, _parser_of(run), completers)
        if name == "config":
            subcommands = command.add_subparsers()
            for one, (_, about) in SUBCOMMANDS.items():
                subcommand = subcommands.add_parser(one, help=about)
                _fill(subcommand, f"config {one}", _parser_of(config, one), completers)
    return root


def _parser_of(run: Callable[[Sequence[str]], int], *words: str) -> Parser:
    """Return the parser of a command."""
    try:
        with redirect_stdout(StringIO()):
            run([*words, "--help"])
    except HelpShown as shown:
        return shown.parser
    raise AssertionError(f"{run.__module__} does not obey --help")


def _fill(
    into: ArgumentParser, command: str, flags: Parser, completers: Mapping[str, Complete]
) -> None:
    """Add the flags of a command and its other words, with what completes them."""
    flags.add_flags_to(into)
    for action in into._actions:
        if any(flags.known[one].default_value is not None for one in action.option_strings):
            action.nargs = 0  # its value is written with "=": the next word is another one
        elif isinstance(action.metavar, str):
            _complete(action, completers.get(action.metavar))
    for word in POSITIONALS.get(command, ()):
        options: dict[str, Any] = {"nargs": word.nargs, "choices": word.choices}
        _complete(into.add_argument(word.name, **options), completers.get(word.complete))


def _complete(action: Action, complete: Complete | None) -> None:
    if complete is not None:
        action.complete = complete  # type: ignore[attr-defined]  # where shtab looks for it


def _completers() -> dict[str, Complete]:
    """Return what completes a value, by its metavar."""
    import shtab

    return {
        "FILE": shtab.FILE,
        "DIR": shtab.DIRECTORY,
        # to zsh, shtab's own "(*.py)" means files with the attributes in parentheses
        "SCRIPT": {**shtab.glob("*.py"), "zsh": "_files -g '*.py'"},
    }
