"""Strict reader of profiles.

A profile is one flat YAML map of settings. It is read from the parser's events, so that every
value keeps its line, every scalar stays the text that the user wrote (`no` is not a boolean here),
and no tag, alias or deep nesting is ever built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from headway._version import __version__
from headway.contract.origin import Layer, Origin
from headway.errors import Code, ConfigError, Problem
from headway.settings.profile_files import read_text, shown
from headway.settings.setting import Raw

VERSION = 1
_NULLS = ("", "~", "null", "Null", "NULL")
_QUOTED = ("'", '"', "|", ">")  # a scalar's style; a plain one has none


class Mark(NamedTuple):
    """Positions of a key and its value in the text, as indices of characters."""

    key: int
    value: int
    end: int  # after the value's last character
    items: Mapping[str, Mark]  # of the keys in a map; empty for other values


class Entry(NamedTuple):
    """One key of a profile: its value as a string, a list or a map of strings, and its position."""

    raw: Raw
    origin: Origin
    mark: Mark | None = None  # None if it is not from a file
    faults: tuple[Problem, ...] = ()  # why the value is invalid; `resolve` reports them
    repeats: tuple[Entry, ...] = ()  # other values of a duplicate key, which is one of the faults
    has_value: bool = True  # False for `key:` alone, which is one of the faults, too


Entries = Mapping[str, Entry]
"""A layer: the entries of one source, by the names of settings."""


def read_profile(path: str, layer: Layer) -> dict[str, Entry]:
    """Return the entries of the profile at `path`, by key; unknown keys are not reported here.

    Args:
        path: a YAML file.
        layer: for the origin of each value.

    Raises:
        ConfigError: the file is unreadable, not YAML or not a flat map, uses an alias or a tag,
            has a newer version, or has a duplicate key or a key without a value.
    """
    entries = parse_profile(read_text(path), path, layer)
    entries.pop("version", None)
    return entries


def read_layer(path: str, layer: Layer) -> dict[str, Entry]:
    """Return the entries like `read_profile`, but leave faults of single keys to `resolve`, which
    reports them with all other problems.
    """
    return parse_layer(read_text(path), path, layer)


def parse_layer(text: str, path: str, layer: Layer) -> dict[str, Entry]:
    """Return the entries like `read_layer`, from a profile's `text`; `path` is for messages."""
    entries = _Reader(path, layer).read(text)
    version = entries.pop("version", None)
    if version and version.faults:
        raise ConfigError.of(version.faults)
    return entries


def parse_profile(text: str, path: str, layer: Layer) -> dict[str, Entry]:
    """Return the entries of a profile's `text`, including the version; `path` is for messages."""
    reader = _Reader(path, layer)
    entries = reader.read(text)
    if reader.faults:
        raise ConfigError.of([fault for _, fault in reader.faults])
    return entries


def yaml_loader() -> Any:
    """Return the YAML loader for profiles: the C extension if it is installed."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Reader:
    """Turns the parser's events into entries; knows the file's name for its messages."""

    def __init__(self, path: str, layer: Layer) -> None:
        self.path = path
        self.layer = layer
        self.noun = "the file of answers" if layer is Layer.ANSWERS else "the profile"
        self.faults: list[tuple[str, Problem]] = []  # with the key that each belongs to
        self.key = ""  # the one that is being read
        self.without_value: set[str] = set()  # keys whose last value is missing, or an item of it
        self.end = 0  # of the value read last

    def read(self, text: str) -> dict[str, Entry]:
        import yaml  # 20 ms, spent only where there is a profile

        loader = yaml_loader()
        self.yaml: Any = yaml
        try:
            self.events: Iterator[Any] = yaml.parse(text, Loader=loader)
            next(self.events)  # the stream's start
            if isinstance(next(self.events), yaml.StreamEndEvent):
                raise self._error(
                    f"{self.noun} is empty", None, "write `device: auto`, or delete it"
                )
            entries = self._settings()
            next(self.events)  # the document's end
            extra = next(self.events)
            if not isinstance(extra, yaml.StreamEndEvent):
                raise self._error(
                    "the file has more than one YAML document", extra, "keep only one document"
                )
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            is_tab = mark is not None and text[mark.index : mark.index + 1] == "\t"
            problem = "a tab is used for indentation" if is_tab else error.problem
            raise ConfigError(
                f"{self.noun} is not YAML: {problem or error.context}",
                where=str(self._origin(mark)),
                fix="indent with spaces" if is_tab else "write one `key: value` on each line",
            ) from None
        except yaml.YAMLError as error:  # a character that YAML forbids; it has no mark
            line = text.count("\n", 0, getattr(error, "position", 0)) + 1
            raise ConfigError(
                f"{self.noun} is not YAML: {str(error).splitlines()[0]}",
                where=str(Origin(self.layer, shown(self.path), line)),
                fix="remove that character",
            ) from None
        for key, fault in self.faults:
            entries[key] = entries[key]._replace(faults=(*entries[key].faults, fault))
        return entries

    def _settings(self) -> dict[str, Entry]:
        event = next(self.events)
        if not isinstance(event, self.yaml.MappingStartEvent):
            found = (
                "a list" if isinstance(event, self.yaml.SequenceStartEvent) else "a single value"
            )
            raise self._error(
                f"{self.noun} is {found}", event, "write one `key: value` on each line"
            )
        self._reject_tags_and_aliases(event)
        entries: dict[str, Entry] = {}
        for key, event in self._keys():
            self.key = key
            self.without_value.discard(key)
            raw, mark = self._value(key, event)
            if key in entries:
                what = f"duplicate key {key!r}; first defined in line {entries[key].origin.line}"
                self._note(Code.DUPLICATE_KEY, key, what, event, "keep one of the two")
                repeats = (*entries[key].repeats, self._entry(raw, event, mark))
                entries[key] = entries[key]._replace(repeats=repeats)
                continue
            entries[key] = self._entry(raw, event, mark)
            if key == "version":
                self._check_version(raw, event)
        return entries

    def _entry(self, raw: Raw, at: Any, mark: Mark) -> Entry:
        """Return the entry of the value that was read last, whose key is the event `at`."""
        origin = self._origin(at.start_mark)
        return Entry(raw, origin, mark, has_value=self.key not in self.without_value)

    def _check_version(self, raw: Raw, event: Any) -> None:
        """Stop at a newer version before its new keys are reported as unknown.

        A version is N, or N/WRITER with the version of the Headway that wrote the profile.
        """
        number, _, writer = raw.partition("/") if isinstance(raw, str) else ("", "", "")
        is_number = number.isdecimal() and number.isascii() and int(number[:9]) > 0
        if is_number and int(number[:9]) <= VERSION:
            return
        by = f", written by Headway {writer}" if is_number and writer else ""
        needed = f"'headway>={writer}'" if by else "-U headway"
        raise self._error(
            f"version is {raw!r}{by}, but Headway {__version__} reads version {VERSION}",
            event,
            f"update to a Headway that reads version {number}: `pip install {needed}`"
            if is_number
            else f"write `version: {VERSION}`",
        )

    def _value(self, key: str, at: Any) -> tuple[Raw, Mark]:
        """Read the value of `key`, whose key is the event `at`."""
        event = next(self.events)
        self._reject_tags_and_aliases(event)
        items: dict[str, Mark] = {}
        raw: Raw
        if isinstance(event, self.yaml.SequenceStartEvent):
            raw = []
            while not isinstance(item := next(self.events), self.yaml.SequenceEndEvent):
                raw.append(self._scalar(key, item))
            self._close(item)
        elif isinstance(event, self.yaml.MappingStartEvent):
            raw = {}
            for name, item in self._keys():
                value = next(self.events)
                if name in raw:
                    twice = f"{key}.{name}"
                    what = f"duplicate key {twice!r}"
                    self._note(Code.DUPLICATE_KEY, twice, what, item, "keep one of the two")
                raw[name] = self._scalar(f"{key}.{name}", value)
                places = (item.start_mark.index, value.start_mark.index, self.end)
                items[name] = Mark(*places, items={})
        else:
            raw = self._scalar(key, event)
        return raw, Mark(at.start_mark.index, event.start_mark.index, self.end, items)

    def _keys(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys of the map that has just begun; the caller reads each value."""
        while not isinstance(event := next(self.events), self.yaml.MappingEndEvent):
            if self._is_null(event):
                raise self._error("a key is empty", event, "write `key: value`, or delete the line")
            yield self._scalar("a key", event), event
        self._close(event)

    def _close(self, event: Any) -> None:
        """Record where a collection ends: after its bracket, or with its last value."""
        if event.start_mark.index < event.end_mark.index:
            self.end = event.end_mark.index

    def _scalar(self, key: str, event: Any) -> str:
        self._reject_tags_and_aliases(event)
        if not isinstance(event, self.yaml.ScalarEvent):
            raise self._error(f"{key} is nested too deeply", event, "write plain values")
        value: str = event.value
        if self._is_null(event):
            fix = "add a value, or delete the line"
            self._note(Code.NO_VALUE, key, f"{key} has no value", event, fix)
            self.without_value.add(key)
        self.end = event.end_mark.index
        return value

    def _is_null(self, event: Any) -> bool:
        is_plain = isinstance(event, self.yaml.ScalarEvent) and event.style not in _QUOTED
        return is_plain and event.value in _NULLS

    def _reject_tags_and_aliases(self, event: Any) -> None:
        if isinstance(event, self.yaml.AliasEvent) or getattr(event, "anchor", None):
            raise self._error(
                "YAML anchors (&) and aliases (*) are not supported in profiles",
                event,
                "write the value out",
            )
        if getattr(event, "tag", None):
            raise self._error(
                f"YAML tags are not supported in profiles: {event.tag!r}", event, "remove the tag"
            )

    def _error(self, what: str, event: Any, fix: str) -> ConfigError:
        """Return the error that ends reading, with the faults found so far."""
        place = str(self._origin(None if event is None else event.start_mark))
        problem = Problem(what, place, fix, code=Code.BAD_FILE)
        return ConfigError.of([*(fault for _, fault in self.faults), problem])

    def _note(self, code: Code, name: str, what: str, event: Any, fix: str) -> None:
        """Record a problem after which the rest of the file can still be read."""
        place = str(self._origin(event.start_mark))
        self.faults.append((self.key, Problem(what, place, fix, code=code, names=(name,))))

    def _origin(self, mark: Any) -> Origin:
        origin = Origin(self.layer, shown(self.path))
        return origin._replace(line=mark.line + 1, column=mark.column + 1) if mark else origin
