"""Profiles: selection by name or path, search for `headway.yaml`, and a strict parser.

A profile is a flat YAML map of settings. Each value records its line number, each scalar stays text
(`no` is not a boolean), and tags, aliases and deep nesting are rejected. A profile that is not
selected by its path must be trusted: its `env` can make processes load code.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from headway._version import __version__
from headway.errors import Code, ConfigError, Problem, suggestion
from headway.ipc import paths
from headway.ipc.origin import Layer, Origin
from headway.settings.setting import Raw

VARIABLE = "HEADWAY_PROFILE"
PROJECT_FILE = "headway.yaml"
MAX_BYTES = 2**20
VERSION = 1
_MAX_DEPTH = 100  # of nested lists and maps; a profile needs two levels
_NULLS = ("", "~", "null", "Null", "NULL")
_FIX = "write one `key: value` on each line"


class ProfileChoice(NamedTuple):
    """The selected user profile."""

    name: str  # a name or a path
    path: str
    chosen_by: str  # the flag or variable that selected it; empty for the default

    def must_exist(self) -> None:
        if not exists(self.path):
            names = [] if is_path(self.name) else profile_names(os.path.dirname(self.path))
            raise ConfigError(
                f"profile {self.name!r} does not exist{suggestion(self.name, names)}",
                where=self.chosen_by or shown(self.path),
                fix="`headway config list` shows all profiles; "
                f"`headway config --profile {self.name}` creates this one",
                code=Code.UNREADABLE,
            )


def choose_profile(
    flag: str | None = None, environ: Mapping[str, str] = os.environ
) -> ProfileChoice:
    """Return the selected user profile, which may not exist.

    `flag`, the value of --profile, overrides HEADWAY_PROFILE.
    """
    name, chosen_by, way_out = "default", "", ""
    if flag is not None:
        name, chosen_by = flag, "flag --profile"
    elif VARIABLE in environ:
        name, chosen_by = environ[VARIABLE], f"environment {VARIABLE}"
        way_out = f"; or `unset {VARIABLE}`"
    if is_path(name):
        return ProfileChoice(name, os.path.abspath(os.path.expanduser(name)), chosen_by)
    if not _is_name(name):
        raise ConfigError(
            f"invalid profile name {name!r}",
            where=chosen_by,
            fix=f"use letters, digits, '-', '_' and '.', or a path to a YAML file{way_out}",
            code=Code.BAD_VALUE,
        )
    path = os.path.join(paths.user_folder("config", environ), f"{name}.yaml")
    return ProfileChoice(name, path, chosen_by)


def trusted_profile(
    flag: str | None = None, environ: Mapping[str, str] = os.environ
) -> ProfileChoice:
    """Return the selected profile; raise ConfigError if it is selected by name and untrusted."""
    chosen = choose_profile(flag, environ)
    if not is_path(chosen.name) and exists(chosen.path):
        _reject_untrusted(chosen.path)
    return chosen


def is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def _is_name(name: str) -> bool:
    return name[:1].isalnum() and all(char.isalnum() or char in "-_." for char in name)


def profile_names(folder: str) -> list[str]:
    """Return the sorted names of the profiles in `folder`."""
    try:
        files = os.listdir(folder)
    except OSError:
        return []
    stems = (file.removesuffix(".yaml") for file in files if file.endswith(".yaml"))
    return sorted(stem for stem in stems if _is_name(stem))


def find_project_profile(start: str = ".", trusted: str | None = None) -> str | None:
    """Return the nearest `headway.yaml` from `start` upward; None if there is none.

    The search stops at the home folder, the root or a file system boundary. `trusted`, a path
    selected by the user, is accepted regardless of its permissions.
    """
    home = os.path.realpath(paths.home())
    try:
        folder = os.path.realpath(start)
    except FileNotFoundError:  # the working directory was removed
        return None
    device = os.stat(folder).st_dev
    while True:
        path = os.path.join(folder, PROJECT_FILE)
        # skip folders that this user cannot enter
        if os.access(folder, os.X_OK) and exists(path):
            if trusted is None or os.path.realpath(trusted) != os.path.realpath(path):
                _reject_untrusted(path)
            return path
        parent = os.path.dirname(folder)
        if folder in (home, parent) or os.stat(parent).st_dev != device:
            return None
        folder = parent


def _reject_untrusted(path: str) -> None:
    """Raise ConfigError unless the profile at `path` and its link target are trusted.

    A trusted file is owned by this user, root or the owner of the home folder (in a container, HOME
    may belong to another user), and is not world-writable.
    """
    trusted = {os.getuid(), 0}
    with suppress(OSError):
        trusted.add(os.stat(paths.home()).st_uid)
    what, remedy = "", ""
    for status in (os.lstat(path), os.stat(path) if os.path.exists(path) else os.lstat(path)):
        if status.st_uid not in trusted:
            what = f"{path} is owned by user {status.st_uid}, not by you or root"
        elif status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
            what, remedy = f"{path} is writable by all users", "`chmod o-w {0}`; "
        elif not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            what = f"{path} is not a file"
    if what:
        import shlex  # only for errors

        fix = remedy + "if you trust it, select it: `--profile {0}`, or `export {1}={0}`"
        raise ConfigError(
            f"{what}, so the profile is not trusted",
            where=f"profile {shown(path)}",
            fix=fix.format(shlex.quote(path), VARIABLE),
            code=Code.NOT_TRUSTED,
        )


def shown(path: str) -> str:
    """Abbreviate the home folder in `path` to ~."""
    home = paths.home()
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path


def exists(path: str) -> bool:
    """Return whether `path` exists, even as a broken link; raise ConfigError if the check fails."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(
            f"cannot check whether the profile exists: {error.strerror}",
            where=shown(path),
            fix=f"fix the permissions of {shown(os.path.dirname(path))} and its parent folders, "
            "or set XDG_CONFIG_HOME to a folder that you can read",
            code=Code.UNREADABLE,
        ) from None
    return True


def text_at(path: str) -> str:
    """Return the text of a profile; empty if the file does not exist."""
    return read_text(path) if exists(path) else ""


def read_text(path: str, kind: str = "profile") -> str:
    """Return the text of a file or pipe of at most MAX_BYTES; `kind` is its name in errors."""
    where = shown(path)
    is_open = path.startswith(("/dev/fd/", "/dev/stdin", "/proc/"))  # already open in this process
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode) and not is_open:  # opening it blocks
            raise ConfigError(
                f"the {kind} {path!r} is a named pipe",
                where=where,
                fix="pass a file, or <(command)",
                code=Code.UNREADABLE,
            )
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the {kind} {path!r}: {error.strerror}",
            where=where,
            fix="pass an existing, readable file",
            code=Code.UNREADABLE,
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"the {kind} exceeds the limit of {MAX_BYTES // 2**20} MiB",
            where=where,
            fix="pass another file, or shorten this file",
            code=Code.UNREADABLE,
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"the {kind} is not UTF-8 text",
            where=f"{where}, line {line}",
            fix="save the file as UTF-8",
            code=Code.UNREADABLE,
        ) from None


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
            if name == "version" and (found := self._text(name, value)) != str(VERSION):
                what = f"version is {found!r}, but Headway {__version__} reads version {VERSION}"
                fix = f"write `version: {VERSION}`, or update Headway: `pip install -U headway`"
                raise self._error(what, value, fix)
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
