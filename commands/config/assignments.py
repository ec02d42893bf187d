"""KEY=VALUE words and imported values, checked and as a profile holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.contract.origin import Layer, Origin
from headway.errors import ConfigError, Problem
from headway.settings.profile import Entries, Entry
from headway.settings.resolve import parse_layers
from headway.settings.setting import Raw
from headway.settings.table import TABLE


def assignments(words: Sequence[str], where: str) -> dict[str, Raw]:
    """Return the values that words such as `num_processes=2` set, by key.

    Raises:
        ConfigError: all words without "=", unknown keys and invalid values at once.
    """
    problems = []
    values: dict[str, Raw] = {}
    for word in _joined(words):
        key, equals, raw = word.partition("=")
        if not _is_text(word):
            problems.append(Problem(f"{word!r} is not UTF-8", where, "write it as text"))
        elif not equals:
            name, space, value = word.partition(" ")
            fix = f"write {name}={value if space else 'VALUE'}"
            problems.append(Problem(f"{word!r} is not KEY=VALUE", where, fix))
        elif key in values:
            problems.append(Problem(f"{key} is set twice", where, "keep one of the two"))
        if equals:
            values[key] = raw
    if "env" in values:
        twice = [key for key in values if key.startswith("env.")]
        problems += [
            Problem(f"{key} is set twice: env sets all variables", where, "keep one of the two")
            for key in twice
        ]
    origin = Origin(Layer.ASSIGNMENT, reason=where)
    return checked_entries({key: Entry(raw, origin) for key, raw in values.items()}, problems)


def _joined(words: Sequence[str]) -> list[str]:
    """Return the words, with a key and the value typed after it as one word for the message."""
    joined: list[str] = []
    for word in words:
        is_value = joined and "=" not in word + joined[-1] and " " not in joined[-1]
        if is_value and joined[-1].partition(".")[0] in TABLE:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def _is_text(word: str) -> bool:
    """False for a text with bytes that are not UTF-8, which Python decodes to surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in word)


def checked_values(values: Mapping[str, Raw], where: str) -> dict[str, Raw]:
    """Return `values` as a profile holds them.

    Args:
        values: by key; `env.NAME` is one variable.
        where: their origin, for messages.

    Raises:
        ConfigError: unknown keys and invalid values, all at once.
    """
    origin = Origin(Layer.IMPORTED, reason=where)
    return checked_entries({key: Entry(raw, origin) for key, raw in values.items()})


def checked_entries(
    entries: Mapping[str, Entry], problems: Sequence[Problem] = ()
) -> dict[str, Raw]:
    """Return the values of `entries` as a profile holds them.

    Args:
        entries: by key; `env.NAME` is one variable.
        problems: found before, to be raised together with the others.

    Raises:
        ConfigError: unknown keys and invalid values, all at once.
    """
    try:
        parse_layers([layer_of(key, entry) for key, entry in entries.items()])
    except ConfigError as error:
        problems = [*problems, *error.problems]
    if problems:
        raise ConfigError.of(problems)
    return {
        key: TABLE[key].parse(entry.raw)
        if key == "env"
        else TABLE[key].canonical(entry.raw)
        if key in TABLE
        else entry.raw
        for key, entry in entries.items()
    }


def layer_of(key: str, entry: Entry) -> Entries:
    """Return a layer with one entry; `env.NAME` is one variable."""
    name, _, item = key.partition(".")
    if name != "env" or not item:
        return {key: entry}
    return {name: entry._replace(raw={item: str(entry.raw)})}


def layers_of(values: Mapping[str, Raw], where: str) -> list[Entries]:
    """Return a layer for each of `values`; `env.NAME` is one variable."""
    origin = Origin(Layer.IMPORTED, reason=where)
    return [layer_of(key, Entry(raw, origin)) for key, raw in values.items()]
