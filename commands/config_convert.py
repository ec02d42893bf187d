"""`headway config import | export`: profiles from and for Accelerate, torchrun and the shell."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headway.commands.accelerate_file import (
    IN_ACCELERATE,
    Imported,
    from_accelerate,
    to_accelerate,
)
from headway.commands.config_check import SCRIPT, checked, mistakes
from headway.commands.config_edit import apply, checked_values, layers_of, set_all
from headway.commands.flags import Parser, look_at_machine
from headway.commands.schema import beginning
from headway.commands.torchrun_line import from_torchrun, in_torchrun, is_torchrun, to_torchrun
from headway.detection import detect_machine
from headway.errors import ConfigError, MachineError
from headway.launcher.plan import LaunchPlan, Program, build_plan
from headway.machine import Machine
from headway.profile import parse_profile
from headway.profile_files import choose_profile, read_text, shown, text_at
from headway.resolve import environment_layer, profile_layers, resolve
from headway.settings import TABLE, Settings

FORMATS = ("torchrun", "env", "sh", "accelerate")
_COMMAND = re.compile(r"""(?:[^\\'"&|;<>]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")*""", re.DOTALL)
"""The beginning of a shell line up to its first operator."""


def import_file(argv: Sequence[str]) -> int:
    """Take over what an Accelerate file or a torchrun command line says."""
    parser = Parser(
        "config import",
        "Take over what another tool's configuration says: a file that `accelerate config` wrote "
        "(YAML or JSON), or a torchrun command line, on this line or in a file.",
        usage="headway config import [flags] FILE\n"
        "       headway config import [flags] [NAME=VALUE ...] torchrun ...",
    )
    parser.flag("--dry-run", help="print the profile that would be written, and write nothing")
    parser.profile_flag()
    own, words = parser.split(argv)
    parsed = parser.parse_args(own)
    if not is_torchrun(words):  # whose flags are its own
        parsed, words = parser.parse_words(argv)
    machine = detect_machine()
    imported, where = _read(words, machine.cores)
    values = checked_values(imported.values, where)
    path = choose_profile(parsed.profile).path

    def merged(text: str) -> str:
        before = parse_profile(text, path, "profile") if text else {}
        before.pop("version", None)
        problems = mistakes([before, *layers_of(values, where)], machine)
        if problems:
            raise ConfigError.of(problems)
        return set_all(text or beginning(path), values)

    if parsed.dry_run:
        text = merged(text_at(path))
        checked(text, path, machine)
        print(text, end="")
    else:
        apply(path, merged, machine)
    for line in imported.left:
        print(f"no counterpart here: {line}")
    if parsed.dry_run:
        return 0
    profile = [] if parsed.profile is None else ["--profile", parsed.profile]
    print(f"next: {shlex.join(['headway', 'launch', *profile, *(imported.launch or [SCRIPT])])}")
    return 0


def _read(words: list[str], cores: int) -> tuple[Imported, str]:
    """Return what is to be imported, and where it comes from."""
    if len(words) == 1 and " " in words[0].strip():
        words = _words(words[0])
    if is_torchrun(words):
        where = "the torchrun command line"
        return from_torchrun(words, cores, where), where
    if len(words) != 1:
        raise ConfigError(
            f"{shlex.join(words)!r} is neither one file nor a torchrun command line",
            where="the command line",
            fix="`headway config import FILE`, or `headway config import torchrun ...`",
        )
    where = shown(words[0])
    text = read_text(words[0])
    found = [from_torchrun(line, cores, where) for line in _torchruns_in(text)]
    if any(other.values != found[0].values for other in found):
        raise ConfigError(
            f"there are {len(found)} torchrun commands in it, which say different things",
            where=where,
            fix="give the one that is meant: `headway config import torchrun ...`",
        )
    if found:
        return found[0], where
    return from_accelerate(_parsed(text, where), where), where


def _words(text: str) -> list[str]:
    try:
        return _command(text.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(
            f"the command line cannot be read: {str(error).lower()}",
            where="the command line",
            fix="close the quote, or give the words without quotes around them all",
        ) from None


def _command(line: str) -> list[str]:
    """Return the words of a shell line's first command.

    Raises:
        ValueError: a quote is not closed.
    """
    found = _COMMAND.match(line)
    assert found is not None
    command, operator = found.group(), line[found.end() :][:1]
    if operator in ("<", ">"):
        command = re.sub(r"(?<=\s)\d+\Z", "", command)  # 2>&1
    return shlex.split(line if operator in ("'", '"', "\\") else command, comments=True)


def _torchruns_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each torchrun command in a shell script."""
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = _command(line)
        except ValueError:  # an open quote: no command that stands on one line
            continue
        if is_torchrun(words):
            yield words


def _parsed(text: str, where: str) -> dict[str, Any]:
    """Return the map in a YAML or JSON file; every scalar in it is the text that stands there."""
    import yaml

    try:
        if text.lstrip().startswith("{"):
            found = _as_texts(json.loads(text, object_pairs_hook=_unique))
        else:
            # not the C loader: deep nesting would overflow its stack
            node = yaml.compose(text, Loader=yaml.BaseLoader)
            events: Iterable[Any] = yaml.parse(text, Loader=yaml.BaseLoader)
            for event in events:
                if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                    line = event.start_mark.line + 1
                    raise ValueError(f"line {line} has a YAML anchor (&) or alias (*)")
            found = _texts_at(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the file cannot be read as YAML or JSON: {' '.join(str(error).split())}",
            where=where,
            fix="name a file that `accelerate config` wrote, or a `torchrun ...` command line",
        ) from None
    return found if isinstance(found, dict) else {}


def _texts_at(node: Any) -> Any:
    """Return the data at a node of YAML, with every scalar as it stands there."""
    if node is None or isinstance(node.value, str):
        return node and node.value
    if node.id == "mapping":
        return _unique([(_texts_at(key), _texts_at(value)) for key, value in node.value])
    return [_texts_at(item) for item in node.value]


def _unique(pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise ValueError("a key is a list or a map")
        if key in found:
            raise ValueError(f"{key} stands twice")
        found[key] = value
    return found


def _as_texts(value: Any) -> Any:
    """Return JSON data with every scalar as YAML would write it."""
    if isinstance(value, dict):
        return {key: _as_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_texts(item) for item in value]
    return value if isinstance(value, str) else json.dumps(value)


def export(argv: Sequence[str]) -> int:
    """Print the settings that a launch here would have in another tool's words."""
    parser = Parser("config export", "Print the settings of a launch here in other words.")
    parser.flag("--format", metavar="{" + ",".join(FORMATS) + "}", help="in whose words")
    parser.profile_flag()
    parser.machine_flag()
    parsed = parser.parse_flags(argv)
    if parsed.format not in FORMATS:
        parser.error(f"--format is {parsed.format!r}, but it must be one of {', '.join(FORMATS)}")
    machine, environ = look_at_machine(parsed, os.environ)
    layers = [*profile_layers(profile=parsed.profile), environment_layer(environ)]
    settings = resolve(layers, machine, environ)
    said = list(dict.fromkeys(name for layer in layers for name in layer))
    if parsed.format == "torchrun":
        plan = _lasting_plan(settings, machine)
        print(to_torchrun(plan, [SCRIPT]))
        _report_missing(name for name in said if not in_torchrun(plan, name))
    elif parsed.format == "accelerate":
        import yaml

        config = to_accelerate(_lasting_plan(settings, machine))
        print(yaml.safe_dump(config, sort_keys=False), end="")
        _report_missing(name for name in said if name not in IN_ACCELERATE)
    else:
        for name in said:
            if settings.values[name].value is not None:  # such as the port on one machine
                print(_assignment(name, settings, parsed.format))
    return 0


def _lasting_plan(settings: Settings, machine: Machine) -> LaunchPlan:
    """Return the plan of a launch, in which nothing depends on the moment."""
    if settings.devices.idle is not None:
        raise ConfigError(
            f"devices is {str(settings.devices)!r}, and which GPUs are idle is found at a launch",
            where=str(settings.origin("devices")),
            fix="name the GPUs, or use --format env or sh",
        )
    try:
        return build_plan(settings, machine, Program(SCRIPT), python="python", environ={})
    except MachineError as error:
        there = "say which machine it is for: `headway env --json` there, --machine FILE here; or "
        raise MachineError.of(
            [problem._replace(fix=there + problem.fix) for problem in error.problems]
        ) from None


def _report_missing(names: Iterable[str]) -> None:
    for name in names:
        print(f"headway: note: {name} has no counterpart there", file=sys.stderr)


def _assignment(name: str, settings: Settings, style: str) -> str:
    """Return a line that sets the variable of a setting, for a shell or an env file."""
    value = settings.values[name].value
    if name == "env":
        text = shlex.join(f"{k}={v}" for k, v in value.items())
    else:
        text = ",".join(map(str, value)) if name == "ranks" else str(value)
    if style == "sh":
        return f"export {TABLE[name].variable}={shlex.quote(text)}"
    if "\n" in text:
        raise ConfigError(
            f"{name} holds a line break, which an env file cannot",
            where=str(settings.origin(name)),
            fix="use --format sh",
        )
    return f"{TABLE[name].variable}={text}"
