"""`headway config` and its subcommands, which show, change, check and convert profiles.

`main` imports only the requested subcommand. Of other packages, only `exchange` imports this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from headway.errors import Code, ConfigError, suggestion

SUBCOMMANDS = {  # name: (function, help)
    "show": (
        "config.show.show",
        "print every setting and its value; with --origin, also its origin",
    ),
    "get": ("config.show.get", "KEY: print the value that a launch would use"),
    "path": ("config.show.path", "print the path of your profile: $EDITOR $(headway config path)"),
    "list": ("config.show.list_profiles", "list your profiles, and the one in use"),
    "validate": ("config.check.validate", "check profiles, for CI: exit code 1 if one is invalid"),
    "set": ("config.edit.set_keys", "KEY=VALUE ...: set keys"),
    "unset": ("config.edit.unset_keys", "KEY ...: remove keys; their values are then detected"),
    "export": (
        "exchange.export_settings.export",
        "--format env|sh|k8s: print the settings for another tool",
    ),
    "import": (
        "exchange.import_settings.import_file",
        "FILE: import the settings from an `accelerate config` file",
    ),
}

APPENDIX = f"""
subcommands (each has its own --help):
{chr(10).join(f"  {name:<10}{text}" for name, (_, text) in SUBCOMMANDS.items())}
"""


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        from headway.commands.config.ask import ask

        return ask(argv, APPENDIX)
    word, *rest = argv
    if word not in SUBCOMMANDS:
        raise ConfigError(
            f"unknown subcommand {word!r} of `headway config`{suggestion(word, SUBCOMMANDS)}",
            where="the command line",
            fix="run `headway config --help` to list the subcommands",
            code=Code.COMMAND_LINE,
        )
    module, _, function = SUBCOMMANDS[word][0].rpartition(".")
    exit_code: int = getattr(import_module(f"headway.commands.{module}"), function)(rest)
    return exit_code
