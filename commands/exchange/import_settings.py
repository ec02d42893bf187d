"""`headway config import`: settings from an Accelerate file or a torchrun command line."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from headway.commands.config.check import SCRIPT, checked_values, layers_of
from headway.commands.config.edit import apply, set_all
from headway.commands.exchange import Imported
from headway.commands.exchange.accelerate_file import from_accelerate
from headway.commands.exchange.torchrun import WHERE, from_torchrun, is_torchrun
from headway.commands.flags import Parser, bad_words
from headway.contract.origin import Layer, Origin
from headway.errors import ConfigError, Problem
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.settings.problems import profile_problems
from headway.settings.profile import Entries, Entry, compose, parse_profile
from headway.settings.profile_edit import masked_profile, unset_value
from headway.settings.profile_files import choose_profile, read_text, shown, text_at
from headway.settings.table import TABLE

_FIX = "`headway config import FILE`, or `headway config import torchrun ...`"


def import_file(argv: Sequence[str]) -> int:
    """Write the settings of an Accelerate file or a torchrun command line to the profile."""
    parser = Parser(
        "config import",
        "Write the settings of another tool to your profile: those in a file of "
        "`accelerate config` (YAML or JSON), or those of the torchrun command line on this line.",
        usage="headway config import [flags] FILE\n"
        "       headway config import [flags] [NAME=VALUE ...] torchrun ...",
    )
    parser.flag("--dry-run", help="print the profile that would be written, and write nothing")
    parser.shared_flags("--show-secrets")
    parser.flag(
        "--lossy",
        help="import the rest of a file whose training cannot be taken over as a whole "
        "(DeepSpeed, Megatron-LM, fp8)",
    )
    parser.shared_flags("--profile")
    own, words = parser.split(argv)
    parsed = parser.parse_args(own)
    if len(words) == 1 and " " in words[0] and not os.path.lexists(words[0]):
        words = shlex.split(words[0])  # a command line in quotes
    elif not is_torchrun(words):  # else the flags are torchrun's
        parsed, words = parser.parse_words(argv)
    machine = detect_machine()
    imported, where = _read(words, machine)
    entries = _checked(imported, where)
    values, layers = checked_values(entries), layers_of(entries)
    path = choose_profile(parsed.profile).path
    profile = [] if parsed.profile is None else ["--profile", parsed.profile]
    if imported.lost and not parsed.lossy:
        raise _would_lose(imported.lost, where, [*profile, *words])

    def merged(text: str) -> str:
        before = parse_profile(text, path, Layer.PROFILE) if text else {}
        for name in imported.reset:
            if name in before and name not in values:
                text = unset_value(text, name)
                del before[name]
        if problems := _problems(before, layers, machine, profile):
            raise ConfigError.of(problems)
        return set_all(text, path, values)

    if parsed.dry_run:
        text = merged(text_at(path))
        if found := profile_problems([parse_profile(text, path, Layer.PROFILE)], machine):
            raise ConfigError.of(found)
        print(text if parsed.show_secrets else masked_profile(text), end="")
    else:
        apply(path, merged, machine)
    remarks = sys.stderr if parsed.dry_run else sys.stdout  # standard output is the profile then
    for line in (*imported.lost, *imported.not_imported):
        print(f"not imported: {line}", file=remarks)
    if not parsed.dry_run:
        program = imported.program or (SCRIPT,)
        print(f"next: {shlex.join(['headway', 'launch', *profile, *program])}")
    return 0


def _would_lose(lost: Sequence[str], where: str, words: Sequence[str]) -> ConfigError:
    """Return the error for settings without which a model may not fit, or train differently."""
    command = shlex.join(["headway", "config", "import", "--lossy", *words])
    problem = Problem(
        "training would be different: Headway has DDP and FSDP, in fp32, fp16 or bf16, and would "
        "lose",
        where,
        f"`{command}` imports the rest",
        details="\n".join(lost),
    )
    return ConfigError.of([problem])


def _read(words: Sequence[str], machine: Machine) -> tuple[Imported, str]:
    """Return what the words of the command line import, and from where."""
    if is_torchrun(words):
        return from_torchrun(words, machine), WHERE
    if len(words) != 1:
        what = f"{shlex.join(words)!r} is" if words else "nothing is given, which is"
        raise bad_words(f"{what} neither one file nor a torchrun command line", fix=_FIX)
    where = shown(words[0])
    text = read_text(words[0], "configuration", may_be_pipe=True)
    # JSON is YAML, too
    config = _texts_at(compose(text, Origin(Layer.IMPORTED, where)), where)
    return from_accelerate(config if isinstance(config, dict) else {}, where), where


def _texts_at(node: Any, where: str) -> Any:
    """Return the data of a YAML node, with every scalar as its text."""
    if node is None or node.id == "scalar":
        return node and node.value
    if node.id == "sequence":
        return [_texts_at(item, where) for item in node.value]
    found: dict[str, Any] = {}
    for key, value in node.value:
        if key.id != "scalar" or key.value in found:
            what = f"duplicate key {key.value!r}" if key.id == "scalar" else "a key is no text"
            at = f"{where}, line {key.start_mark.line + 1}"
            raise ConfigError(what, where=at, fix="correct it in that file")
        found[key.value] = _texts_at(value, where)
    return found


def _checked(imported: Imported, where: str) -> dict[str, Entry]:
    """Return the entries of a profile; invalid values are named as in the other tool."""
    problems = []
    for name, theirs in imported.their_names.items():
        raw = imported.values[name]
        try:
            TABLE[name].parse(raw)
        except ValueError as error:
            what = f"{theirs} is {raw if isinstance(raw, str) else ','.join(raw)!r}, {error}"
            problems.append(Problem(what, where, f"correct {theirs} there"))
    if problems:
        raise ConfigError.of(problems)
    origin = Origin(Layer.IMPORTED, reason=where)
    return {key: Entry(raw, origin) for key, raw in imported.values.items()}


def _problems(
    before: Mapping[str, Entry], values: Sequence[Entries], machine: Machine, profile: Sequence[str]
) -> list[Problem]:
    """Return the problems of the imported values together with the rest of the profile.

    If removing one key of the profile solves them, the fix is the command that removes it.
    """
    problems = list(profile_problems([before, *values], machine))
    if problems and not profile_problems(values, machine):
        for key, rest in _without_one(before):
            if not profile_problems([rest, *values], machine):
                command = f"`{shlex.join(['headway', 'config', 'unset', *profile, key])}`"
                fix = f"remove the old value with {command}, then import again"
                return [problem._replace(fix=fix) for problem in problems]
    return problems


def _without_one(layer: Mapping[str, Entry]) -> list[tuple[str, Entries]]:
    """Return each key of a profile (env.NAME for a variable), and the profile without it."""
    found: list[tuple[str, Entries]] = []
    for key, entry in layer.items():
        if key == "env" and isinstance(entry.raw, Mapping):
            for name in entry.raw:
                rest = {other: text for other, text in entry.raw.items() if other != name}
                found.append((f"env.{name}", {**layer, key: entry._replace(raw=rest)}))
        else:
            found.append((key, {k: other for k, other in layer.items() if k != key}))
    return found
