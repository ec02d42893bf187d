"""The machine profile on disk: which one is meant, where it is, and reading it strictly.

A profile is one flat YAML map of settings. It is read from the parser's events, so that every
value keeps its line, every scalar stays the text that the user wrote (`no` is no boolean here), and
no tag, alias or deep nesting is ever built.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from headway._version import __version__
from headway.errors import ConfigError, Problem, did_you_mean
from headway.settings import Origin, Raw

VERSION = 1
VARIABLE = "HEADWAY_PROFILE"
PROJECT_FILE = "headway.yaml"
DEFAULT_NAME = "default"
MAX_BYTES = 2**20
_NULLS = ("", "~", "null", "Null", "NULL")
_QUOTED = ("'", '"', "|", ">")  # a scalar's style; a plain one has none


class Mark(NamedTuple):
    """Where a key and its value stand in the text, as indices of characters."""

    key: int
    value: int
    end: int  # behind the value's last character
    items: Mapping[str, Mark]  # of the keys in a map; empty for other values


class Entry(NamedTuple):
    """One key of a profile: its value as text, list or map of texts, and where it stands."""

    raw: Raw
    origin: Origin
    mark: Mark | None = None  # None for what is in no file


class ProfileChoice(NamedTuple):
    """Which profile of this user is meant."""

    name: str  # a name, or a path
    path: str
    chosen_by: str  # the flag, variable or file that says so; empty where nobody does

    def must_exist(self) -> None:
        """Refuse a profile that somebody named and that is not there.

        Raises:
            ConfigError: it does not exist.
        """
        if not os.path.lexists(self.path):
            folder = os.path.dirname(self.path)
            close = None if is_path(self.name) else did_you_mean(self.name, profile_names(folder))
            raise ConfigError(
                f"there is no profile {self.name!r}"
                + (f"; did you mean {close!r}?" if close else ""),
                where=self.chosen_by or shown(self.path),
                fix="`headway config list` names all; "
                f"`headway config --profile {self.name}` makes this one",
            )


def choose_profile(
    flag: str | None = None, environ: Mapping[str, str] = os.environ
) -> ProfileChoice:
    """Return which profile of this user is meant, whether or not it exists.

    Args:
        flag: the value of --profile; it beats HEADWAY_PROFILE, which beats `headway config use`.
        environ: read for HEADWAY_PROFILE and the folder of the profiles.

    Raises:
        ConfigError: the name cannot be one.
    """
    if flag is not None:
        name, chosen_by = flag, "flag --profile"
    elif VARIABLE in environ:
        name, chosen_by = environ[VARIABLE], f"environment {VARIABLE}"
    else:
        selection = selection_path(environ)
        name, chosen_by = DEFAULT_NAME, ""
        if os.path.exists(selection):
            name, chosen_by = read_text(selection).strip(), shown(selection)
    if is_path(name):
        return ProfileChoice(name, _absolute(name, chosen_by), chosen_by)
    if not _is_name(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a profile",
            where=chosen_by,
            fix="use letters, digits, '-', '_' and '.', or a path to a YAML file",
        )
    return ProfileChoice(name, os.path.join(user_folder(environ), f"{name}.yaml"), chosen_by)


def _absolute(name: str, chosen_by: str) -> str:
    try:
        return os.path.abspath(os.path.expanduser(name))
    except FileNotFoundError:
        raise ConfigError(
            f"{name!r} is in the working directory, which has been removed",
            where=chosen_by,
            fix="`cd` to a folder that exists, or give the whole path",
        ) from None


def is_path(name: str) -> bool:
    """True for what names a file, rather than a profile of this user."""
    return "/" in name or os.sep in name or name.endswith((".yaml", ".yml"))


def _is_name(name: str) -> bool:
    return name[:1].isalnum() and all(char.isalnum() or char in "-_." for char in name)


def profile_names(folder: str) -> list[str]:
    """Return the names of the profiles in `folder`, sorted."""
    try:
        files = os.listdir(folder)
    except OSError:
        return []
    stems = (file.removesuffix(".yaml") for file in files if file.endswith(".yaml"))
    return sorted(stem for stem in stems if _is_name(stem))


def selection_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of the file that `headway config use` writes: the name of a profile."""
    return os.path.join(user_folder(environ), "selected")


def user_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder of this user's profiles, whether or not it exists."""
    if "linux" in sys.platform:  # what platformdirs answers, without its import time
        folder = environ.get("XDG_CONFIG_HOME", "")
        if not os.path.isabs(folder):  # the XDG specification has relative ones ignored
            folder = os.path.join(_home(), ".config")
        return os.path.join(folder, "headway")
    from platformdirs import user_config_dir

    return user_config_dir("headway", appauthor=False)


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
    entries = parse_profile(read_text(path), path, layer)
    entries.pop("version", None)
    return entries


def parse_profile(text: str, path: str, layer: str) -> dict[str, Entry]:
    """Return the entries of a profile's `text`, the version included; `path` is for messages."""
    return _Reader(path, layer).read(text)


def read_text(path: str) -> str:
    """Return the text of the file at `path`, which should be a profile.

    Raises:
        ConfigError: unreadable, no ordinary file, larger than MAX_BYTES, no UTF-8.
    """
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(
                    "the profile is no file", where=shown(path), fix="move it out of the way"
                )
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            "there is no such file", where=shown(path), fix="name a file that exists"
        ) from None
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
        self.problems: list[Problem] = []
        self.end = 0  # of the value read last

    def read(self, text: str) -> dict[str, Entry]:
        import yaml  # 20 ms, spent only where there is a profile

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self.yaml: Any = yaml
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
                where=f"{self.layer} {shown(self.path)}, line {line}",
                fix="remove that character",
            ) from None
        if self.problems:
            raise ConfigError.of(self.problems)
        return entries

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
            raw, mark = self._value(key, event)
            if key in entries:
                first = entries[key].origin.words.split(", ")[-1]
                self._note(f"{key!r} stands twice; first in {first}", event, "keep one of the two")
                continue
            words = f"{self.layer} {shown(self.path)}, line {event.start_mark.line + 1}"
            origin = Origin(self.layer, words, event.start_mark.column + 1)
            entries[key] = Entry(raw, origin, mark)
            if key == "version":
                self._check_version(raw, event)
        return entries

    def _check_version(self, raw: Raw, event: Any) -> None:
        """Stop at a newer version before its other novelties are taken for mistakes."""
        if raw == str(VERSION):
            return
        newer = isinstance(raw, str) and raw.isdecimal() and raw.isascii() and int(raw[:9]) > 0
        raise self._error(
            f"version is {raw!r}, but Headway {__version__} reads version {VERSION}",
            event,
            f"update to a Headway that reads version {raw}: `pip install -U headway`"
            if newer
            else f"write `version: {VERSION}`",
        )

    def _value(self, key: str, at: Any) -> tuple[Raw, Mark]:
        """Read the value of `key`, which stands where the event `at` does."""
        event = next(self.events)
        self._refuse_tricks(event)
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
                    self._note(f"{key}.{name} stands twice", item, "keep one of the two")
                raw[name] = self._scalar(f"{key}.{name}", value)
                places = (item.start_mark.index, value.start_mark.index, self.end)
                items[name] = Mark(*places, items={})
        else:
            raw = self._scalar(key, event)
        return raw, Mark(at.start_mark.index, event.start_mark.index, self.end, items)

    def _keys(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys of the map that has just begun; the caller reads each value."""
        while not isinstance(event := next(self.events), self.yaml.MappingEndEvent):
            yield self._scalar("a key", event), event
        self._close(event)

    def _close(self, event: Any) -> None:
        """Note where a collection ends: behind its bracket, or else with its last value."""
        if event.start_mark.index < event.end_mark.index:
            self.end = event.end_mark.index

    def _scalar(self, key: str, event: Any) -> str:
        self._refuse_tricks(event)
        if not isinstance(event, self.yaml.ScalarEvent):
            raise self._error(f"{key} holds a list or a map too deep", event, "write plain values")
        value: str = event.value
        if event.style not in _QUOTED and value in _NULLS:
            self._note(f"{key} has no value", event, "give it one, or delete the line")
        self.end = event.end_mark.index
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
        """Return the error that ends the reading, together with what was noted before."""
        place = self._place(None if event is None else event.start_mark)
        return ConfigError.of([*self.problems, Problem(what, place, fix)])

    def _note(self, what: str, event: Any, fix: str) -> None:
        """Note a problem that the rest of the file can still be read after."""
        self.problems.append(Problem(what, self._place(event.start_mark), fix))

    def _place(self, mark: Any) -> str:
        place = f"{self.layer} {shown(self.path)}"
        return f"{place}, line {mark.line + 1}, column {mark.column + 1}" if mark else place
