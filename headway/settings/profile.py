"""Strict parser for profiles and other YAML files.

A profile is a flat YAML map of settings. Each value records its line number, each scalar stays text
(`no` is not a boolean), and tags, aliases and deep nesting are rejected.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from headway._version import __version__
from headway.errors import Code, ConfigError, Problem
from headway.ipc.origin import Layer, Origin
from headway.settings.profile_files import read_text, shown
from headway.settings.setting import Raw

VERSION = 1
_MAX_DEPTH = 100  # of nested lists and maps; a profile needs two levels
_NULLS = ("", "~", "null", "Null", "NULL")
_FIX = "write one `key: value` on each line"


class Entry(NamedTuple):
    """The unparsed value of a key and its origin."""

    raw: Raw
    origin: Origin
    problems: tuple[Problem, ...] = ()  # why the value is invalid; reported by `resolve`


Entries = Mapping[str, Entry]
"""A layer: the entries of a source, by setting name."""


def read_profile(path: str, layer: Layer) -> dict[str, Entry]:
    """Parse the profile at `path` with `parse_profile`."""
    return parse_profile(read_text(path), path, layer)


def parse_profile(text: str, path: str, layer: Layer) -> dict[str, Entry]:
    """Parse a profile's `text` into entries by key, without the version.

    `resolve` reports invalid values and unknown keys together.

    Raises:
        ConfigError: The text is not YAML, is not a flat map, contains an anchor, alias or tag, or
            has an unsupported version.
    """
    return _Reader(Origin(layer, shown(path))).read(text)


def compose(text: str, source: Origin) -> Any:
    """Return the root node of a YAML document with scalars as text; None if it is empty.

    Raises ConfigError if the text is not YAML or contains anchors, aliases or tags.
    """
    import yaml  # takes 20 ms, so import it only if there is a file

    loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    line = None
    try:
        events: Iterable[Any] = yaml.parse(text, Loader=loader)
        depth = 0
        for event in events:
            refused = ""
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:  # older versions of libyaml have no limit
                refused = f"more than {_MAX_DEPTH} nested lists and maps"
            elif isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                refused = "anchors (&) and aliases (*) are not supported"
            elif getattr(event, "tag", None):
                refused = f"tags are not supported: {event.tag!r}"
            if refused:
                raise yaml.MarkedYAMLError(problem=refused, problem_mark=event.start_mark)
        return yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        what = ", ".join(filter(None, (error.context, error.problem)))
        mark = error.problem_mark or error.context_mark
        if mark is not None:
            line = mark.line + 1
    except yaml.YAMLError as error:  # an invalid character, which has no mark
        what = str(error).splitlines()[0]
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
    at = source._replace(line=line)
    what = f"the file is not valid YAML: {what}"
    raise ConfigError(what, where=str(at), fix=f"{_FIX}, indented with spaces", code=Code.BAD_FILE)


class _Reader:
    def __init__(self, source: Origin) -> None:
        self.source = source
        self.problems: list[Problem] = []  # problems of the current entry

    def read(self, text: str) -> dict[str, Entry]:
        root = compose(text, self.source)
        if root is None:
            raise ConfigError(
                "the file is empty", where=str(self.source), fix=_FIX, code=Code.BAD_FILE
            )
        if root.id != "mapping":
            found = "a list" if root.id == "sequence" else "a single value"
            raise self._error(f"the file is {found}", root, _FIX)
        pairs = list(self._pairs(root))
        for name, _, value in pairs:  # first, as a newer version may have other kinds of values
            if name == "version":
                self._check_version(value)
        entries: dict[str, Entry] = {}
        for name, key, value in pairs:
            self.problems = []
            raw = self._value(name, value)
            if name in entries:
                first = entries[name]
                what = f"duplicate key {name!r}; first defined in line {first.origin.line}"
                self._note(Code.DUPLICATE_KEY, name, what, key, "keep one of the two")
                entries[name] = first._replace(problems=(*first.problems, *self.problems))
            else:
                entries[name] = Entry(raw, self._at(key), tuple(self.problems))
        entries.pop("version", None)
        return entries

    def _pairs(self, node: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name, the key node and the value node of each pair in a map."""
        for key, value in node.value:
            if key.id == "scalar" and _is_null(key):
                raise self._error("a key is empty", key, "write `key: value`, or delete the line")
            yield self._text("a key", key), key, value

    def _check_version(self, node: Any) -> None:
        raw = self._text("version", node)
        if raw != str(VERSION):
            what = f"version is {raw!r}, but Headway {__version__} reads version {VERSION}"
            fix = f"write `version: {VERSION}`, or update Headway: `pip install -U headway`"
            raise self._error(what, node, fix)

    def _value(self, name: str, node: Any) -> Raw:
        if node.id == "sequence":
            return [self._text_or_problem(name, item) for item in node.value]
        if node.id == "scalar":
            return self._text_or_problem(name, node)
        found: dict[str, str] = {}
        for item, key, value in self._pairs(node):
            full = f"{name}.{item}"
            if item in found:
                what = f"duplicate key {full!r}"
                self._note(Code.DUPLICATE_KEY, full, what, key, "keep one of the two")
            found[item] = self._text_or_problem(full, value)
        return found

    def _text_or_problem(self, name: str, node: Any) -> str:
        text = self._text(name, node)
        if _is_null(node):
            fix = "add a value, or delete the line"
            self._note(Code.NO_VALUE, name, f"{name} has no value", node, fix)
        return text

    def _text(self, name: str, node: Any) -> str:
        if node.id != "scalar":
            raise self._error(f"{name} is nested too deeply", node, "write plain values")
        text: str = node.value
        return text

    def _at(self, node: Any) -> Origin:
        return self.source._replace(line=node.start_mark.line + 1)

    def _error(self, what: str, node: Any, fix: str) -> ConfigError:
        return ConfigError(what, where=str(self._at(node)), fix=fix, code=Code.BAD_FILE)

    def _note(self, code: str, name: str, what: str, node: Any, fix: str) -> None:
        self.problems.append(Problem(what, str(self._at(node)), fix, code=code, names=(name,)))


def _is_null(node: Any) -> bool:
    return not node.style and node.value in _NULLS
