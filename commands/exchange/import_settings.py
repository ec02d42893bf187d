"""`headway config import`: settings from an Accelerate file or a torchrun command line."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from headway.commands.config.check import SCRIPT, checked_values, layers_of
from headway.commands.config.edit import apply, set_all
from headway.commands.exchange.accelerate_file import from_accelerate
from headway.commands.exchange.imported import Imported
from headway.commands.exchange.text_maps import read_map
from headway.commands.exchange.torchrun_line import WHERE, from_torchrun, is_torchrun
from headway.commands.flags import Parser
from headway.contract.origin import Layer, Origin
from headway.errors import ConfigError, Problem
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.settings.problems import profile_problems
from headway.settings.profile import Entries, Entry, parse_profile
from headway.settings.profile_edit import masked_profile, unset_value
from headway.settings.profile_files import choose_profile, read_text, shown, text_at
from headway.settings.setting import Raw
from headway.settings.table import TABLE

_RUNS_TORCHRUN = re.compile(r"^[^#:\n]*(torchrun|torch\.distributed\.(run|launch))\b", re.MULTILINE)
"""A line of a script; in an Accelerate file, the word follows a `#` or a `:`."""

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
    parser.secrets_flag()
    parser.flag(
        "--lossy",
        help="import the rest of a file whose training cannot be taken over as a whole "
        "(DeepSpeed, Megatron-LM, fp8)",
    )
    parser.profile_flag()
    own, words = parser.split(argv)
    parsed = parser.parse_args(own)
    if not is_torchrun(words):  # else the flags are torchrun's
        parsed, words = parser.parse_words(argv)
    machine = detect_machine()
    imported, where = _read(words, machine)
    values = _checked(imported, where)
    origin = Origin(Layer.IMPORTED, reason=where)
    layers = layers_of({key: Entry(raw, origin) for key, raw in values.items()})
    path = choose_profile(parsed.profile).path
    profile = [] if parsed.profile is None else ["--profile", parsed.profile]
    if imported.lost and not parsed.lossy:
        raise _would_lose(imported.lost, where, [*profile, *words])

    def merged(text: str) -> str:
        before = parse_profile(text, path, Layer.PROFILE) if text else {}
        for name in imported.reset:
            if name in before and name not in values:
                text = unset_value(text, name)
        kept = parse_profile(text, path, Layer.PROFILE) if text else {}
        problems = _problems(kept, layers, machine, profile)
        if problems:
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
    return ConfigError.of(
        [
            Problem(
                "training would be different: Headway has DDP and FSDP, in fp32, fp16 or bf16, "
                "and would lose",
                where,
                f"`{command}` imports the rest",
                details="\n".join(lost),
            )
        ]
    )


def _read(words: Sequence[str], machine: Machine) -> tuple[Imported, str]:
    """Return what the words of the command line import, and from where."""
    if is_torchrun(words):
        return from_torchrun(words, machine), WHERE
    if not words:
        raise ConfigError(
            "a file or a torchrun command line is required", where="the command line", fix=_FIX
        )
    if len(words) > 1:
        raise ConfigError(
            f"{shlex.join(words)!r} is neither one file nor a torchrun command line",
            where="the command line",
            fix=_FIX,
        )
    if is_torchrun(words[0].split()):
        raise ConfigError(
            "the torchrun command line is quoted as one word",
            where="the command line",
            fix=f"remove the quotes: `headway config import {words[0]}`",
        )
    where = shown(words[0])
    text = read_text(words[0], "configuration", may_be_pipe=True)
    if text.startswith("#!") or _RUNS_TORCHRUN.search(text):
        raise ConfigError(
            "this is a shell script; commands in scripts are not imported",
            where=where,
            fix="pass the torchrun command itself: `headway config import torchrun ...`",
        )
    return from_accelerate(read_map(text, where), where), where


def _checked(imported: Imported, where: str) -> dict[str, Raw]:
    """Return the values as a profile holds them.

    Raises:
        ConfigError: invalid values, all at once, by their names in the other tool.
    """
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
    return checked_values({key: Entry(raw, origin) for key, raw in imported.values.items()})


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
