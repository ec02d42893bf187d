"""`headway config`: asks about this machine and writes its profile; its subcommands show, change,
check and convert profiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from headway.errors import ConfigError, did_you_mean

SUBCOMMANDS = {  # name: the function that runs it, what it does
    "show": ("config.show.show", "every setting and its value; --origin: and where it comes from"),
    "path": ("config.show.path", "where your profile lies"),
    "list": ("config.show.list_profiles", "your profiles, and the one in use"),
    "schema": ("config.show.schema", "the JSON schema of profiles, for editors"),
    "validate": ("config.check.validate", "check profiles, for CI: exit code 1 where one is wrong"),
    "set": ("config.edit.set_keys", "KEY=VALUE ...: change these and nothing else"),
    "unset": ("config.edit.unset_keys", "KEY ...: back to what is detected"),
    "edit": ("config.draft.edit", "open the profile in $EDITOR; checked before it replaces"),
    "export": (
        "exchange.export_settings.export",
        "--format torchrun|env|sh|accelerate: in other words",
    ),
    "import": (
        "exchange.import_settings.import_file",
        "FILE or torchrun ...: take over another's settings",
    ),
    "use": ("config.edit.use", "NAME: the profile that is used from now on"),
}

APPENDIX = f"""
subcommands (each has its own --help):
{chr(10).join(f"  {name:<10}{text}" for name, (_, text) in SUBCOMMANDS.items())}
"""


def main(argv: Sequence[str]) -> int:
    """Run `headway config` with these words and return the exit code."""
    if not argv or argv[0].startswith("-"):
        from headway.commands.config.ask import ask

        return ask(argv, APPENDIX, SUBCOMMANDS)
    module, _, function = _subcommand(argv[0]).rpartition(".")
    exit_code: int = getattr(import_module(f"headway.commands.{module}"), function)(argv[1:])
    return exit_code


def _subcommand(word: str) -> str:
    if word in SUBCOMMANDS:
        return SUBCOMMANDS[word][0]
    close = did_you_mean(word, SUBCOMMANDS)
    raise ConfigError(
        f"{word!r} is no subcommand of `headway config`"
        + (f"; did you mean {close!r}?" if close else ""),
        where="the command line",
        fix="`headway config --help` lists them",
    )
