"""`headway config set | unset`: change keys of a profile; the rest of the file is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from headway.commands.config.check import assignments, plan_for
from headway.commands.flags import Parser
from headway.errors import Code, ConfigError, HeadwayError, Problem, suggestion
from headway.ipc.origin import Layer, Origin
from headway.ipc.secrets import masked_value
from headway.ipc.stderr import log
from headway.launcher.plan.notes import oversubscribed
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.settings.problems import profile_problems
from headway.settings.profile import Entry, parse_profile, shown, text_at, trusted_profile
from headway.settings.profile_edit import (
    BLANK,
    is_blank,
    set_value,
    unset_value,
    write_profile,
    written,
)
from headway.settings.setting import Raw
from headway.settings.table import TABLE, Settings


def set_keys(argv: Sequence[str]) -> int:
    """Set keys of a profile; comments and all other lines are kept."""
    # rich is too slow for --help
    rows = "".join(f"  {row.name:<29}{row.help}\n" for row in TABLE.values())
    parser = Parser(
        "config set",
        "Set these keys in your profile; comments and all other lines are kept. "
        "env.NAME=VALUE sets a single variable.",
        usage="headway config set [--profile NAME] KEY=VALUE ...",
        appendix=f"\nkeys:\n{rows}",
    )
    parser.shared_flags("--profile")
    parsed, words = parser.parse_words(argv)
    if not words:
        parser.error("KEY=VALUE is required")
    origin = Origin(Layer.ASSIGNMENT, reason="the command line")
    values = assignments(words, origin)
    path = trusted_profile(parsed.profile).path
    apply(path, lambda text: set_all(text, values), detect_machine(), origin)
    return 0


def set_all(text: str, values: Mapping[str, Raw]) -> str:
    """Return the text of a profile with these keys set, in the order of the table."""
    if is_blank(text):
        text = f"{text.rstrip()}\n{BLANK}".lstrip()
    order = list(TABLE)
    keys = sorted(values, key=lambda key: order.index(key.partition(".")[0]))
    return reduce(lambda edited, key: set_value(edited, key, values[key]), keys, text)


def unset_keys(argv: Sequence[str]) -> int:
    parser = Parser(
        "config unset",
        "Remove these keys from your profile; their values are then detected.",
        usage="headway config unset [--profile NAME] KEY ...",
    )
    parser.shared_flags("--profile")
    parsed, keys = parser.parse_words(argv)
    if not keys:
        parser.error("KEY is required")
    chosen = trusted_profile(parsed.profile)
    chosen.must_exist()
    apply(chosen.path, lambda text: _without(text, keys), detect_machine())
    return 0


def _without(text: str, keys: Sequence[str]) -> str:
    """Return the profile `text` without these keys; raise all errors at once."""
    problems = []
    entries = parse_profile(text, "the profile", Layer.PROFILE)
    present = list(flat({name: entry.raw for name, entry in entries.items()}))
    for key in keys:
        try:
            text = unset_value(text, key)
        except KeyError:
            what = f"{key!r} is not set in the profile{suggestion(key, present)}"
            if key == "version":
                what = "version cannot be removed"
            fix = "run `headway config show --origin` to see where each value comes from"
            problems.append(Problem(what, "the command line", fix, code=Code.COMMAND_LINE))
    if problems:
        raise ConfigError.of(problems)
    return text


def apply(
    path: str, change: Callable[[str], str], machine: Machine, origin: Origin | None = None
) -> None:
    """Change the profile at `path`, or create it, and print the differences.

    Values that this machine does not support are written, with a note, because a profile may be for
    another machine. A problem with a changed value points to `origin` or to the line in the
    profile.
    """
    old = text_at(path)
    before = {} if is_blank(old) else parse_profile(old, path, Layer.PROFILE)
    new = change(old)
    after = parse_profile(new, path, Layer.PROFILE)
    entries = dict(after)
    for name, entry in after.items():
        if _raw(before, name) == entry.raw:
            entries[name] = before[name]  # keeps its line in the profile
        elif origin is not None:
            entries[name] = entry._replace(origin=origin)
    if found := profile_problems([entries], machine):
        raise ConfigError.of(found)
    write_profile(path, new)
    print(f"{'unchanged:' if new == old else 'wrote'} {shown(path)}")
    for line in _differences(before, after):
        print(f"  {line}")
    try:
        notes = [*oversubscribed(plan_for([after], machine))]
    except HeadwayError as error:
        notes = [problem.what for problem in error.problems]
    for note in notes:
        log(f"note: {note}")


def _differences(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> list[str]:
    lines = []
    for key in {**before, **after}:
        old, new = _raw(before, key), _raw(after, key)
        if old != new:
            now = "removed" if new is None else _shown(key, new)
            lines.append(f"{key}: {now}" + ("" if old is None else f"  (was {_shown(key, old)})"))
    return lines


def _shown(key: str, raw: Raw) -> str:
    """Return a value as written in profiles, with secrets masked."""
    return written(masked_value(key, raw))


def flat(values: Mapping[str, Raw]) -> dict[str, Raw]:
    """Return the values, with each variable of `env` as `env.NAME`; an invalid `env` is kept."""
    try:
        variables = Settings.env.parser(values.get("env", {}))
    except ValueError:
        return dict(values)
    rest = {key: raw for key, raw in values.items() if key != "env"}
    return {**rest, **{f"env.{name}": text for name, text in variables.items()}}


def _raw(entries: Mapping[str, Entry], key: str) -> Raw | None:
    return entries[key].raw if key in entries else None
