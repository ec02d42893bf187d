"""The machine profile on disk: where it is, reading it strictly, writing it atomically.

A profile is one flat YAML map of settings. It is read from the parser's events, so that every
value keeps its line, every scalar stays the text that the user wrote (`no` is no boolean here), and
no tag, alias or deep nesting is ever built.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from headway.errors import ConfigError
from headway.settings import Origin, Raw

VERSION = 1
PROJECT_FILE = "headway.yaml"
MAX_BYTES = 2**20
_NULLS = ("", "~", "null", "Null", "NULL")
_QUOTED = ("'", '"', "|", ">")  # a scalar's style; a plain one has none


class Entry(NamedTuple):
    """One key of a profile: its value as text, list or map of texts, and where it stands."""

    raw: Raw
    origin: Origin


def user_profile_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of this user's profile, whether or not it exists."""
    if "linux" in sys.platform:  # what platformdirs answers, without its import time
        folder = environ.get("XDG_CONFIG_HOME", "")
        if not os.path.isabs(folder):  # the XDG specification has relative ones ignored
            folder = os.path.join(_home(), ".config")
        return os.path.join(folder, "headway", "default.yaml")
    from platformdirs import user_config_dir

    return os.path.join(user_config_dir("headway", appauthor=False), "default.yaml")


def _home() -> str:
    home = os.path.expanduser("~")
    if home == "/" and hasattr(os, "getuid"):  # what an empty HOME gives
        import pwd

        home = pwd.getpwuid(os.getuid()).pw_dir
    return home


def find_project_profile(start: str = ".") -> str | None:
    """Return the nearest `headway.yaml` from `start` upward, or None.

    The search ends after the home folder, at the root, and where another file system begins.

    Raises:
        ConfigError: the file found belongs neither to this user nor to root; its `env` could make
            this user's processes load somebody else's code.
    """
    home = os.path.realpath(_home())
    try:
        folder = os.path.realpath(start)
    except FileNotFoundError:  # the working directory has been removed
        return None
    device = os.stat(folder).st_dev
    while True:
        path = os.path.join(folder, PROJECT_FILE)
        if os.path.lexists(path):
            _check_owner(path)
            return path
        parent = os.path.dirname(folder)
        if folder in (home, parent) or os.stat(parent).st_dev != device:
            return None
        folder = parent


def _check_owner(path: str) -> None:
    if not hasattr(os, "getuid"):
        return
    for owner in {os.lstat(path).st_uid, os.stat(path).st_uid if os.path.exists(path) else 0}:
        if owner not in (os.getuid(), 0):
            raise ConfigError(
                f"{path} belongs to user {owner}, neither to you nor to root, and is not obeyed",
                where=f"project profile {shown(path)}",
                fix=f"if you trust it, make it yours: `cp` it to your own {PROJECT_FILE}",
            )


def shown(path: str) -> str:
    """Return `path` as a person would write it, with ~ for the home folder."""
    home = _home()
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path


def read_profile(path: str, layer: str) -> dict[str, Entry]:
    """Return the entries of the profile at `path`, by key; whether a key exists is not asked here.

    Args:
        path: a YAML file.
        layer: `user profile` or `project profile`, for the origin of each value.

    Raises:
        ConfigError: unreadable, no YAML, not a flat map, a duplicate key, an alias, a tag, a newer
            version.
    """
    text = _read_text(path)
    entries = _Reader(path, layer).read(text)
    version = entries.pop("version", None)
    if version is not None and version.raw != str(VERSION):
        newer = isinstance(version.raw, str) and version.raw.isdecimal()
        raise ConfigError(
            f"version is {version.raw!r}, but this Headway reads version {VERSION}",
            where=version.origin.words,
            fix="update Headway: `pip install -U headway`" if newer else f"`version: {VERSION}`",
        )
    return entries


def _read_text(path: str) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(
                    "the profile is no file", where=shown(path), fix="move it out of the way"
                )
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"the profile cannot be read: {error.strerror}",
            where=shown(path),
            fix="mend its permissions, or remove it",
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"the profile is larger than {MAX_BYTES // 2**20} MiB, so it is no profile",
            where=shown(path),
            fix="move the file away, or write a new one with `headway config --yes`",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            "the profile is not UTF-8 text",
            where=f"{shown(path)}, line {line}",
            fix="save the file as UTF-8",
        ) from None


class _Reader:
    """Turns the parser's events into entries; knows the file's name for its messages."""

    def __init__(self, path: str, layer: str) -> None:
        self.path = path
        self.layer = layer

    def read(self, text: str) -> dict[str, Entry]:
        import yaml  # 20 ms, spent only where there is a profile

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self.yaml = yaml
        try:
            self.events: Iterator[Any] = yaml.parse(text, Loader=loader)
            next(self.events)  # the stream's start
            if isinstance(next(self.events), yaml.StreamEndEvent):
                raise self._error(
                    "the profile is empty", None, "write `device: auto`, or delete it"
                )
            entries = self._settings()
            next(self.events)  # the document's end
            extra = next(self.events)
            if not isinstance(extra, yaml.StreamEndEvent):
                raise self._error(
                    "a second document begins", extra, "keep one document in the file"
                )
            return entries
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise ConfigError(
                f"the profile is not YAML: {error.problem or error.context}",
                where=self._place(mark),
                fix="write one `key: value` on each line",
            ) from None
        except yaml.YAMLError as error:  # a character that YAML forbids; it has no mark
            line = text.count("\n", 0, getattr(error, "position", 0)) + 1
            raise ConfigError(
                f"the profile is not YAML: {str(error).splitlines()[0]}",
                where=f"{shown(self.path)}, line {line}",
                fix="remove that character",
            ) from None

    def _settings(self) -> dict[str, Entry]:
        event = next(self.events)
        if not isinstance(event, self.yaml.MappingStartEvent):
            found = "a list" if isinstance(event, self.yaml.SequenceStartEvent) else "a lone value"
            raise self._error(
                f"the profile is {found}", event, "write one `key: value` on each line"
            )
        self._refuse_tricks(event)
        entries: dict[str, Entry] = {}
        for key, event in self._keys():
            if key in entries:
                raise self._error(
                    f"{key!r} stands twice; first in {entries[key].origin.words.split(', ')[-1]}",
                    event,
                    "keep one of the two",
                )
            raw = self._value(key, next(self.events))
            entries[key] = Entry(raw, Origin(self.layer, f"{self.layer} {self._at(event)}"))
        return entries

    def _value(self, key: str, event: Any) -> Raw:
        self._refuse_tricks(event)
        if isinstance(event, self.yaml.SequenceStartEvent):
            items = []
            while not isinstance(item := next(self.events), self.yaml.SequenceEndEvent):
                items.append(self._scalar(key, item))
            return items
        if isinstance(event, self.yaml.MappingStartEvent):
            pairs: dict[str, str] = {}
            for name, place in self._keys():
                if name in pairs:
                    raise self._error(f"{key}.{name} stands twice", place, "keep one of the two")
                pairs[name] = self._scalar(f"{key}.{name}", next(self.events))
            return pairs
        return self._scalar(key, event)

    def _keys(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys of the map that has just begun; the caller reads each value."""
        while not isinstance(event := next(self.events), self.yaml.MappingEndEvent):
            yield self._scalar("a key", event), event

    def _scalar(self, key: str, event: Any) -> str:
        self._refuse_tricks(event)
        if not isinstance(event, self.yaml.ScalarEvent):
            raise self._error(f"{key} holds a list or a map too deep", event, "write plain values")
        value: str = event.value
        if event.style not in _QUOTED and value in _NULLS:
            raise self._error(f"{key} has no value", event, "give it one, or delete the line")
        return value

    def _refuse_tricks(self, event: Any) -> None:
        if isinstance(event, self.yaml.AliasEvent) or getattr(event, "anchor", None):
            raise self._error(
                "a profile takes no YAML anchors (&) or aliases (*)", event, "write the value out"
            )
        if getattr(event, "tag", None):
            raise self._error(
                f"a profile takes no YAML tags, and this is {event.tag!r}", event, "remove the tag"
            )

    def _error(self, what: str, event: Any, fix: str) -> ConfigError:
        place = shown(self.path) if event is None else self._at(event)
        return ConfigError(what, where=f"{self.layer} {place}", fix=fix)

    def _at(self, event: Any) -> str:
        return f"{shown(self.path)}, line {event.start_mark.line + 1}"

    def _place(self, mark: Any) -> str:
        place = f"{self.layer} {shown(self.path)}"
        return f"{place}, line {mark.line + 1}, column {mark.column + 1}" if mark else place


def write_profile(path: str, values: Mapping[str, object], comment: str = "") -> None:
    """Write `values` to the profile at `path`, whole or not at all, readable at every moment.

    Writers take turns by a lock on the folder; the text goes to a temporary file beside the
    profile, is flushed to the disk, and then takes the profile's name. A link is followed, and an
    existing file keeps its permissions.

    Raises:
        ConfigError: the folder cannot be written to, or the disk is full.
    """
    import tempfile

    import yaml

    body = yaml.safe_dump({"version": VERSION, **values}, sort_keys=False, allow_unicode=True)
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    temporary = None
    try:
        os.makedirs(folder, exist_ok=True)
        with _locked(folder):
            mode = stat.S_IMODE(os.stat(target).st_mode) if os.path.exists(target) else 0o644
            handle, temporary = tempfile.mkstemp(prefix=".headway-", suffix=".tmp", dir=folder)
            with open(handle, "w", encoding="utf-8") as file:
                file.writelines(f"# {line}\n" for line in comment.splitlines())
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, target)
            temporary = None
    except OSError as error:
        raise ConfigError(
            f"the profile cannot be written: {error.strerror}",
            where=shown(target),
            fix="make the folder writable, free some space, or set XDG_CONFIG_HOME",
        ) from None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the folder's lock; at the end its entries are put on the disk too."""
    if os.name == "nt":  # folders cannot be opened there: os.replace alone must do
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        os.fsync(handle)
    finally:
        os.close(handle)  # releases the lock
