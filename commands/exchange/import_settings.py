"""`headway config import`: a profile from Accelerate's file, or from a torchrun command line."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from headway.commands.config.check import SCRIPT, checked, mistakes
from headway.commands.config.edit import apply, checked_values, layers_of, set_all
from headway.commands.config.schema import beginning
from headway.commands.exchange.accelerate_file import from_accelerate
from headway.commands.exchange.imported import Imported
from headway.commands.exchange.shell_lines import Word
from headway.commands.exchange.text_maps import read_map
from headway.commands.exchange.torchrun_line import from_torchrun, is_torchrun
from headway.commands.exchange.torchrun_script import is_shell_line, torchruns_in
from headway.commands.flags import Parser
from headway.contract.origin import Layer
from headway.errors import ConfigError, Problem
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.settings.profile import Entries, Entry, parse_profile
from headway.settings.profile_edit import unset_value
from headway.settings.profile_files import choose_profile, is_path, read_text, shown, text_at
from headway.settings.table import TABLE, Raw

_TORCHRUN = re.compile(r"torchrun|torch\.distributed\.(run|launch)\b", re.IGNORECASE)
_OF_ACCELERATE = re.compile(r"compute_environment|distributed_type")
_FIX = "`headway config import FILE`, or `headway config import torchrun ...`"


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
    as_typed = [Word.of(word) for word in words]
    if not (is_torchrun(as_typed) or is_shell_line(as_typed)):  # whose flags are their own
        parsed, words = parser.parse_words(argv)
    machine = detect_machine()
    found, where = _read(words, machine)
    imported = found[0]
    values = _checked(imported, where)
    path = choose_profile(parsed.profile).path
    profile = [] if parsed.profile is None else ["--profile", parsed.profile]
    profile_from_anywhere = ["--profile", path] if profile and is_path(parsed.profile) else profile

    def merged(text: str) -> str:
        before = parse_profile(text, path, Layer.PROFILE) if text else {}
        for name in imported.defaults:
            if name in before and name not in values:
                text = unset_value(text, name)
        kept = parse_profile(text, path, Layer.PROFILE) if text else {}
        kept.pop("version", None)
        problems = _contradictions(kept, layers_of(values, where), machine, profile)
        if problems:
            raise ConfigError.of(problems)
        return set_all(text or beginning(path), values)

    if parsed.dry_run:
        text = merged(text_at(path))
        checked(text, path, machine)
        print(text, end="")
    else:
        apply(path, merged, machine)
    remarks = sys.stderr if parsed.dry_run else sys.stdout  # a profile alone goes to the one
    for line in dict.fromkeys(line for one in found for line in one.left):
        print(f"no counterpart here: {line}", file=remarks)
    if not parsed.dry_run:
        for before, program in dict.fromkeys((one.before, one.launch) for one in found):
            flags = profile_from_anywhere if before else profile
            launch = shlex.join(["headway", "launch", *flags])
            print(f"next: {before}{' '.join([launch, *(program or [SCRIPT])])}")
    return 0


def _read(words: list[str], machine: Machine) -> tuple[list[Imported], str]:
    """Return what is to be imported, once for each command that says it, and where it is from."""
    where = "the torchrun command line"
    as_typed = [Word.of(word) for word in words]
    if is_torchrun(as_typed):
        return [from_torchrun(as_typed, machine, where)], where
    if is_shell_line(as_typed):
        found = torchruns_in(shlex.join(words), machine, where)
        if found:
            return found, where
    if not words:
        raise ConfigError(
            "a file or a torchrun command line is needed", where="the command line", fix=_FIX
        )
    if len(words) != 1:
        raise ConfigError(
            f"{shlex.join(words)!r} is neither one file nor a torchrun command line",
            where="the command line",
            fix=_FIX,
        )
    found = torchruns_in(words[0], machine, where)
    if not found:
        where = shown(words[0])
        text = read_text(words[0], "configuration", may_be_pipe=True)
        found = torchruns_in(text, machine, where)
        if not found and _TORCHRUN.search(text) and not _OF_ACCELERATE.search(text):
            raise ConfigError(
                "there is a torchrun in it that cannot be read there",
                where=where,
                fix="give that command itself: `headway config import torchrun ...`",
            )
        if not found:
            return [from_accelerate(read_map(text, where), where)], where
    if any((one.values, one.defaults) != (found[0].values, found[0].defaults) for one in found):
        raise ConfigError(
            f"there are {len(found)} torchrun commands in it, which say different things",
            where=where,
            fix="give the one that is meant: `headway config import torchrun ...`",
        )
    return found, where


def _checked(imported: Imported, where: str) -> dict[str, Raw]:
    """Return the values as a profile holds them; what is wrong is said in the other tool's words.

    Raises:
        ConfigError: impossible values, all at once.
    """
    problems = []
    for name, theirs in imported.names.items():
        raw = imported.values[name]
        try:
            TABLE[name].parse(raw)
        except ValueError as error:
            what = f"{theirs} is {raw if isinstance(raw, str) else ','.join(raw)!r}, {error}"
            problems.append(Problem(what, where, f"correct {theirs} there"))
    if problems:
        raise ConfigError.of(problems)
    return checked_values(imported.values, where)


def _contradictions(
    before: Mapping[str, Entry], values: Sequence[Entries], machine: Machine, profile: Sequence[str]
) -> list[Problem]:
    """Return what is wrong with the values on top of the profile.

    Where it is one older key that they contradict, the fix is the command that removes it.
    """
    problems = list(mistakes([before, *values], machine))
    if problems and not mistakes(values, machine):
        for key, rest in _without_one(before):
            if not mistakes([rest, *values], machine):
                command = f"`{shlex.join(['headway', 'config', 'unset', *profile, key])}`"
                fix = f"{command} removes the older value; then import again"
                return [problem._replace(fix=fix) for problem in problems]
    return problems


def _without_one(layer: Mapping[str, Entry]) -> list[tuple[str, Entries]]:
    """Return each key of a profile, and the profile without it; env.NAME is one variable."""
    found: list[tuple[str, Entries]] = []
    for key, entry in layer.items():
        if key == "env" and isinstance(entry.raw, Mapping):
            for name in entry.raw:
                rest = {other: text for other, text in entry.raw.items() if other != name}
                found.append((f"env.{name}", {**layer, key: entry._replace(raw=rest)}))
        else:
            found.append((key, {k: other for k, other in layer.items() if k != key}))
    return found
