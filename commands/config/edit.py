"""`headway config set | unset | use`: change a profile, and nothing else in its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import reduce

from headway.commands.config.assignments import assignments
from headway.commands.config.check import checked, launch_problems
from headway.commands.config.schema import with_header, write_schema
from headway.commands.flags import Parser
from headway.contract.notes import say
from headway.contract.origin import Layer, Origin
from headway.contract.secrets import masked_value
from headway.errors import ConfigError, Problem, did_you_mean
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.settings.layers import environment_layer, overridden
from headway.settings.profile import Entries, Entry, parse_profile, read_profile
from headway.settings.profile_edit import (
    change_profile,
    is_blank,
    masked_profile,
    set_value,
    unset_value,
    written,
)
from headway.settings.profile_files import (
    DEFAULT_NAME,
    choose_profile,
    find_project_profile,
    is_path,
    is_there,
    selection_path,
    shown,
)
from headway.settings.resolve import parse_layers
from headway.settings.setting import Raw
from headway.settings.table import TABLE, Settings


def set_keys(argv: Sequence[str]) -> int:
    """Set keys of a profile; comments and all other lines are kept."""
    parser = Parser(
        "config set",
        "Set these keys in your profile; comments and all other lines are kept. "
        "env.NAME=VALUE sets one variable.",
        usage="headway config set [--profile NAME] KEY=VALUE ...",
        appendix=_all_settings(),
    )
    parser.profile_flag()
    parsed, words = parser.parse_words(argv)
    if not words:
        parser.error("KEY=VALUE is required")
    values = assignments(words, "the command line")
    path = choose_profile(parsed.profile).path
    apply(
        path,
        lambda text: set_all(with_header(text, path), values),
        detect_machine(),
        requested=[key.partition(".")[0] for key in values],
        origin=Origin(Layer.ASSIGNMENT, reason="the command line"),
    )
    return 0


def _all_settings() -> str:
    """Return the settings for --help, which is too quick for rich's import."""
    lines = (f"  {row.name:<29}{row.help}\n" for row in TABLE.values())
    return f"\nkeys:\n{''.join(lines)}"


def set_all(text: str, values: Mapping[str, Raw]) -> str:
    """Return the profile `text` with all these keys set; new ones in the table's order."""
    order = list(TABLE)
    keys = sorted(values, key=lambda key: order.index(key.partition(".")[0]))
    return reduce(lambda edited, key: set_value(edited, key, values[key]), keys, text)


def unset_keys(argv: Sequence[str]) -> int:
    """Remove keys from a profile."""
    parser = Parser(
        "config unset",
        "Remove these keys from your profile; their values are then detected.",
        usage="headway config unset [--profile NAME] KEY ...",
    )
    parser.profile_flag()
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
    present = flat(_raws(parse_profile(text, "the profile", Layer.PROFILE)))
    known = [key for key in present if key != "version"]
    for key in keys:
        try:
            if key == "version":
                raise KeyError(key)
            text = unset_value(text, key)
        except KeyError:
            problems.append(_cannot_unset(key, known))
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
    path: str,
    change: Callable[[str], str],
    machine: Machine,
    *,
    replaces_all: bool = False,
    requested: Collection[str] = (),
    origin: Origin | None = None,
) -> None:
    """Change the profile at `path`; print the differences, and what overrules them.

    Args:
        path: the profile; it may be missing.
        change: takes the current text, empty if there is none, and returns the new one.
        machine: this one; a profile that it cannot run is written, with a note.
        replaces_all: `change` ignores the current text, which may be invalid.
        requested: keys to report on, whether or not they change.
        origin: of the requested values, for messages.

    Raises:
        ConfigError: the new profile is invalid, or cannot be written.
    """
    before: dict[str, Entry] = {}
    layer, weaker, stronger = _place_of(path)
    old = ""

    def valid(text: str) -> str:
        nonlocal old
        old = text
        with suppress(*([ConfigError] if replaces_all else [])):
            before.update({} if is_blank(text) else parse_profile(text, path, Layer.PROFILE))
        edited = change(text)
        origins = dict.fromkeys(requested, origin) if origin else {}
        try:
            checked(edited, path, machine, origins)
        except ConfigError as error:
            raise ConfigError.of(_placed(error.problems, text, path, machine)) from None
        return edited

    new = change_profile(path, valid, is_private=_holds_secret)
    after = parse_profile(new, path, layer)
    if not old:
        write_schema()
    print(f"{'unchanged:' if new == old else 'wrote'} {shown(path)}")
    for line in differences(before, after):
        print(f"  {line}")
    if _holds_secret(new) and not _holds_secret(old):
        print("only you can read it now: it holds a secret")
    after.pop("version", None)
    reported = {k: e for k, e in after.items() if k in requested or _raw(before, k) != e.raw}
    layers = [*weaker, after, *stronger]
    # notes, not errors: the profile may be for another machine
    not_here = [problem.what for problem in launch_problems(layers, machine)]
    gone = flat(_raws(before)).keys() - flat(_raws(after)).keys() - {"version"}
    elsewhere = _set_elsewhere(sorted(gone), [*weaker, *stronger])
    for note in [*overridden([reported, *stronger]), *elsewhere, *not_here]:
        say(f"note: {note}")


def _holds_secret(text: str) -> bool:
    try:
        return masked_profile(text) != text
    except ConfigError:  # an invalid profile, which is replaced as a whole
        return False


def _placed(
    problems: Sequence[Problem], text: str, path: str, machine: Machine
) -> Sequence[Problem]:
    """Return the problems of an edited profile; for those that `text` has too, with their line."""
    try:
        checked(text, path, machine)
    except ConfigError as error:
        there = error.problems
        return [next(filter(one.is_same_as, there), one) for one in problems]
    return problems


def differences(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> list[str]:
    """Return one line for each key that was added, changed or removed."""
    lines = []
    for key in {**before, **after}:
        old, new = _raw(before, key), _raw(after, key)
        if old != new and key != "version":
            now = "removed" if new is None else _shown(key, new)
            lines.append(f"{key}: {now}" + ("" if old is None else f"  (was {_shown(key, old)})"))
    return lines


def _shown(key: str, raw: Raw) -> str:
    """Return a value as profiles have it, with secrets masked."""
    return written(masked_value(key, raw))


def _set_elsewhere(keys: Sequence[str], layers: Sequence[Entries]) -> list[str]:
    """Return a note for each key that one of `layers` sets, by the strongest that does."""
    still = {}
    for layer in layers:
        values = flat(_raws(layer))
        for key in keys:
            if key in values:
                origin = layer[key.partition(".")[0]].origin
                still[key] = f"{key} is still set, to {_shown(key, values[key])}: {origin}"
    return list(still.values())


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


def _place_of(path: str) -> tuple[Layer, list[Entries], list[Entries]]:
    """Return the layer of the profile at `path` in a launch here, the weaker and the stronger ones.

    Raises:
        ConfigError: one of them is invalid.
    """
    project = find_project_profile(trusted=path)
    environment = environment_layer()
    parse_layers([environment])
    if project is None:
        return Layer.USER_PROFILE, [], [environment]
    if os.path.realpath(project) != os.path.realpath(path):
        stronger = [read_profile(project, Layer.PROJECT_PROFILE), environment]
        return Layer.USER_PROFILE, [], stronger
    user = choose_profile().path
    is_other = is_there(user) and os.path.realpath(user) != os.path.realpath(path)
    weaker: list[Entries] = [read_profile(user, Layer.USER_PROFILE)] if is_other else []
    return Layer.PROJECT_PROFILE, weaker, [environment]


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
    if chosen.name == DEFAULT_NAME:
        _remove(selection)
    else:
        chosen.must_exist()
        read_profile(chosen.path, Layer.USER_PROFILE)
        name = chosen.path if is_path(chosen.name) else chosen.name
        change_profile(selection, lambda _: f"{name}\n")
    print(f"selected: {shown(chosen.path)}")
    now = choose_profile()
    if now.path != chosen.path:
        note = f"{now.chosen_by} selects {now.name!r} here instead"
        say(f"note: {note}")
    return 0


def _remove(selection: str) -> None:
    try:
        os.unlink(selection)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ConfigError(
            f"the selection cannot be removed: {error.strerror}",
            where=shown(selection),
            fix="remove it by hand, or fix the permissions of its folder",
        ) from None
