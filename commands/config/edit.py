"""`headway config set | unset | use`: change a profile, and nothing else in its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce

from headway.commands.config.check import assignments, launch_problems
from headway.commands.config.show import schema_text
from headway.commands.flags import Parser
from headway.contract.notes import say
from headway.contract.origin import Layer, Origin
from headway.contract.secrets import masked_value
from headway.errors import ConfigError, Problem, did_you_mean
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.settings.problems import profile_problems
from headway.settings.profile import Entry, parse_profile, read_profile
from headway.settings.profile_edit import (
    BLANK,
    change_profile,
    is_blank,
    set_value,
    unset_value,
    written,
)
from headway.settings.profile_files import (
    DEFAULT_NAME,
    choose_profile,
    is_path,
    selection_path,
    shown,
    user_folder,
)
from headway.settings.resolve import parse_layers
from headway.settings.setting import Raw
from headway.settings.table import TABLE, Settings

_SCHEMA = "schema.json"


def set_keys(argv: Sequence[str]) -> int:
    """Set keys of a profile; comments and all other lines are kept."""
    # rich is too slow for --help
    rows = "".join(f"  {row.name:<29}{row.help}\n" for row in TABLE.values())
    parser = Parser(
        "config set",
        "Set these keys in your profile; comments and all other lines are kept. "
        "env.NAME=VALUE sets one variable.",
        usage="headway config set [--profile NAME] KEY=VALUE ...",
        appendix=f"\nkeys:\n{rows}",
    )
    parser.shared_flags("--profile")
    parsed, words = parser.parse_words(argv)
    if not words:
        parser.error("KEY=VALUE is required")
    origin = Origin(Layer.ASSIGNMENT, reason="the command line")
    values = assignments(words, origin)
    path = choose_profile(parsed.profile).path
    apply(path, lambda text: set_all(text, path, values), detect_machine(), origin)
    return 0


def set_all(text: str, path: str, values: Mapping[str, Raw]) -> str:
    """Return the text of the profile at `path` with all these keys set, in the table's order."""
    if not text.strip():
        text = new_profile(path)
    elif is_blank(text):
        text = f"{text.rstrip()}\n{BLANK}"
    order = list(TABLE)
    keys = sorted(values, key=lambda key: order.index(key.partition(".")[0]))
    return reduce(lambda edited, key: set_value(edited, key, values[key]), keys, text)


def new_profile(path: str) -> str:
    """Return the text of an empty profile at `path`; its comment tells editors the schema."""
    folder = user_folder()
    beside = os.path.realpath(os.path.dirname(path)) == os.path.realpath(folder)
    file = _SCHEMA if beside else os.path.join(folder, _SCHEMA)  # editors do not expand ~
    return f"# yaml-language-server: $schema={file}\n{BLANK}"


def unset_keys(argv: Sequence[str]) -> int:
    """Remove keys from a profile."""
    parser = Parser(
        "config unset",
        "Remove these keys from your profile; their values are then detected.",
        usage="headway config unset [--profile NAME] KEY ...",
    )
    parser.shared_flags("--profile")
    parsed, keys = parser.parse_words(argv)
    if not keys:
        parser.error("KEY is required")
    chosen = choose_profile(parsed.profile)
    chosen.must_exist()
    apply(chosen.path, lambda text: _without(text, keys), detect_machine())
    return 0


def _without(text: str, keys: Sequence[str]) -> str:
    """Return the profile `text` without these keys; raise once for all that cannot be removed."""
    problems = []
    present = list(flat(_raws(parse_profile(text, "the profile", Layer.PROFILE))))
    for key in keys:
        try:
            text = unset_value(text, key)
        except KeyError:
            problems.append(_cannot_unset(key, present))
    if problems:
        raise ConfigError.of(problems)
    return text


def _cannot_unset(key: str, in_profile: Sequence[str]) -> Problem:
    """Return why a key cannot be removed: it is not in the profile, or no setting at all."""
    where, fix = "the command line", "`headway config show --origin` says where each value is from"
    if key == "version":
        return Problem("version cannot be removed", where, fix)
    if key in TABLE or key.startswith("env."):
        variables = [name for name in in_profile if name.startswith("env.")]
        close = None if key in TABLE else did_you_mean(key, variables)
        what = f"{key!r} is not set in the profile"
    else:
        close = did_you_mean(key, in_profile) or did_you_mean(key, TABLE)
        what, fix = f"unknown setting {key!r}", "`headway config set --help` lists all settings"
    return Problem(what + (f"; did you mean {close!r}?" if close else ""), where, fix)


def apply(
    path: str, change: Callable[[str], str], machine: Machine, origin: Origin | None = None
) -> None:
    """Change the profile at `path`, which may be missing, and print the differences.

    What this machine cannot run is written, with a note: a profile may be for another one. Problems
    of changed values name `origin`; without it, their line in the profile.
    """
    before: dict[str, Entry] = {}
    old = ""

    def valid(text: str) -> str:
        nonlocal old
        old = text
        before.update({} if is_blank(text) else parse_profile(text, path, Layer.PROFILE))
        edited = change(text)
        entries = parse_profile(edited, path, Layer.PROFILE)
        for name, entry in entries.items():
            if _raw(before, name) == entry.raw:
                entries[name] = before[name]  # with the line where it stands now
            elif origin is not None:
                entries[name] = entry._replace(origin=origin)
        if found := profile_problems([entries], machine):
            raise ConfigError.of(found)
        return edited

    new = change_profile(path, valid)
    after = parse_profile(new, path, Layer.PROFILE)
    if not old:
        with suppress(ConfigError):  # only editors need it
            schema = os.path.join(user_folder(), _SCHEMA)
            change_profile(schema, lambda _: schema_text())
    print(f"{'unchanged:' if new == old else 'wrote'} {shown(path)}")
    for line in _differences(before, after):
        print(f"  {line}")
    for problem in launch_problems([after], machine):
        say(f"note: {problem.what}")


def _differences(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> list[str]:
    """Return one line for each key that was added, changed or removed."""
    lines = []
    for key in {**before, **after}:
        old, new = _raw(before, key), _raw(after, key)
        if old != new:
            now = "removed" if new is None else _shown(key, new)
            lines.append(f"{key}: {now}" + ("" if old is None else f"  (was {_shown(key, old)})"))
    return lines


def _shown(key: str, raw: Raw) -> str:
    """Return a value as profiles have it, with secrets masked."""
    return written(masked_value(key, raw))


def flat(values: Mapping[str, Raw]) -> dict[str, Raw]:
    """Return the values with each variable of `env` as `env.NAME`.

    An invalid `env` is returned unchanged.
    """
    try:
        variables = Settings.env.kind(values.get("env", {}))
    except ValueError:
        return dict(values)
    rest = {key: raw for key, raw in values.items() if key != "env"}
    return {**rest, **{f"env.{name}": text for name, text in variables.items()}}


def _raws(entries: Mapping[str, Entry]) -> dict[str, Raw]:
    return {key: entry.raw for key, entry in entries.items()}


def _raw(entries: Mapping[str, Entry], key: str) -> Raw | None:
    return entries[key].raw if key in entries else None


def use(argv: Sequence[str]) -> int:
    """Select the profile that is used without --profile and HEADWAY_PROFILE."""
    parser = Parser(
        "config use",
        "Use this profile from now on, unless --profile or HEADWAY_PROFILE names another.",
        usage="headway config use NAME",
    )
    _, words = parser.parse_words(argv)
    if len(words) != 1:
        parser.error("exactly one profile is required")
    chosen = choose_profile(words[0], flag_origin="the command line")
    selection = selection_path()
    name = ""  # the default is in use where none is selected
    if chosen.name != DEFAULT_NAME:
        chosen.must_exist()
        parse_layers([read_profile(chosen.path, Layer.USER_PROFILE)])
        name = chosen.path if is_path(chosen.name) else chosen.name
    change_profile(selection, lambda _: name)
    print(f"selected: {shown(chosen.path)}")
    now = choose_profile()
    if now.path != chosen.path:
        say(f"note: {now.chosen_by} selects {now.name!r} here instead")
    return 0
