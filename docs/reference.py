"""The pages of the site that are generated from the code: settings and Python names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import headway
import headway.utils
from headway.settings.setting import AUTO, Count, Setting
from headway.settings.table import TABLE

_SHAPES = {
    "one": "one value",
    "list": "one value, or a list",
    "map": "a map of names to values; sources are merged",
}


def settings_page() -> str:
    """Return the reference of settings as Markdown, generated from the table of settings."""
    lines = [
        "# Settings",
        "",
        "Each setting has a flag of `headway launch` (`--set` for rarely used settings), a key in "
        "a [profile](../guides/profiles.md) and an environment variable. `auto` means that Headway "
        "detects the value.",
        "",
    ]
    for row in TABLE.values():
        lines += [f"## {row.name}", "", f"{_sentence(row.help)}", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in _facts(row)] + [""]
    return "\n".join(lines)


def _facts(row: Setting[object]) -> Iterator[tuple[str, str]]:
    metavar = "" if row.bare is not None else f" {row.metavar}"
    words = f"{row.flag}{metavar}" if row.has_flag else row.as_flag(row.metavar)
    yield "flag", f"`{words}`".replace("|", r"\|")
    if row.bare is not None and row.has_flag:
        yield "flag without a value", f"means `{row.bare}`"
    yield "profile", f"`{row.name}:` {_SHAPES[row.shape]}"
    yield "variable", f"`{row.variable}`"
    yield "default", "not set" if row.default in (None, {}) else f"`{row.default}`"
    if row.choices:
        yield "values", ", ".join(f"`{word}`" for word in row.choices)
    elif isinstance(row.parser, Count):
        highest = f" to {row.parser.maximum}" if row.parser.maximum is not None else " or more"
        auto = f", or `{AUTO}`" if row.default == AUTO else ""
        yield "values", f"a whole number, {row.parser.minimum}{highest}{auto}"
    if row.needs_launcher:
        yield "launcher", "required, even for a single process"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def python_page() -> str:
    """Return the reference of Python names as Markdown for mkdocstrings."""
    lines = ["# Python", "", "The names that scripts import: `from headway import ...`.", ""]
    own = list(_paths(headway, headway.__all__))
    names = [name for name in dir(headway.utils) if not name.startswith("_")]
    others = [path for path in _paths(headway.utils, names) if path not in own]
    lines += [*_directives(own), "## headway.utils", "", *_directives(others)]
    return "\n".join([*lines, *_nested_functions(headway.utils, names), ""])


def _directives(paths: list[str]) -> Iterator[str]:
    for path in paths:
        yield from (f"::: {path}", "")


def _nested_functions(module: ModuleType, names: list[str]) -> Iterator[str]:
    """Yield a line for each nested function, whose name mkdocstrings cannot find."""
    for name in names:
        if is_nested(getattr(module, name)):
            yield f"- `{name}()`: {inspect.getdoc(getattr(module, name))}"


def is_nested(found: object) -> bool:
    """Return whether an object is a function defined inside another function."""
    return inspect.isfunction(found) and "<locals>" in found.__qualname__


def _paths(module: ModuleType, names: list[str]) -> Iterator[str]:
    """Yield the import paths of Headway's classes and functions among `names`."""
    for name in names:
        found = getattr(module, name)
        is_documented = inspect.isclass(found) or inspect.isfunction(found)
        if is_documented and found.__module__.startswith("headway.") and not is_nested(found):
            yield f"{found.__module__}.{found.__qualname__}"
