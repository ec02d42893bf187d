"""Edits profiles: changes one key in the text, and replaces the file atomically.

A key is changed at the position that the parser reported, so that comments and formatting are kept;
the result is parsed again before it is written.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from headway.contract.origin import Layer
from headway.contract.secrets import masked_value
from headway.errors import ConfigError
from headway.settings.profile import VERSION, Mark, parse_profile, yaml_loader
from headway.settings.profile_files import MAX_BYTES, read_text, shown
from headway.settings.profile_trust import chmod_fix
from headway.settings.setting import Raw
from headway.settings.table import Settings

BLANK = f"version: {VERSION}\n"
_OWNERS_ALONE = 0o600
_TEMPORARY = (".headway-", ".tmp")
_PLAIN = re.compile(
    r"""
    0 | [1-9][0-9]{0,15}            # a number that YAML readers write back unchanged,
  | (?: [A-Za-z_/] | \.{1,2}/ ) [A-Za-z0-9_/.+-]*    # or not a number for any reader
  | (?: 0 | [1-9][0-9]{0,7} ) \. (?: 0 | [0-9]{0,6}[1-9] )
    """,
    re.VERBOSE,
)
_TRUTHS = {"y", "n", "yes", "no", "true", "false", "on", "off", "null"}  # to other YAML readers
_LINE_END = re.compile(r"\r?\n|\Z")


def is_blank(text: str) -> bool:
    """Return whether the text contains only comments."""
    lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines())
    return all(not line or line.startswith("#") for line in lines)


def set_value(text: str, key: str, raw: Raw) -> str:
    """Return the profile `text` with `key` set to `raw`, and nothing else changed.

    Args:
        text: a profile that can be read; BLANK is one.
        key: the name of a setting, or `env.NAME` for one variable.

    Raises:
        ConfigError: the key cannot be changed without changing other text.
    """
    values, marks = _read(text)
    name, _, item = key.partition(".")
    inside = values.get(name)
    if item and isinstance(inside, Mapping) and inside:
        edited = _put(text, marks[name].items, item, raw)
        return _checked(edited, {**values, name: {**inside, item: str(raw)}}, key)
    value = {**_variables(inside), item: str(raw)} if item else raw
    return _checked(_put(text, marks, name, value), {**values, name: value}, key)


def unset_value(text: str, key: str) -> str:
    """Return the profile `text` without `key` and the comment on its line.

    Raises:
        ConfigError: the key cannot be changed without changing other text.
        KeyError: the key does not exist.
    """
    values, marks = _read(text)
    name, _, item = key.partition(".")
    inside = values[name]
    if item and name != "env":
        raise KeyError(key)
    if item:
        rest = _variables(inside)
        del rest[item]
        if rest and isinstance(inside, Mapping):
            edited = _cut(text, marks[name].items, item)
            return _checked(edited, {**values, name: rest}, key)
        if rest:
            return set_value(text, name, rest)
    if not values.keys() - {name}:  # a profile must not become empty
        text = _put(text, marks, "version", str(VERSION))
        values, marks = _read(text)
    del values[name]
    return _checked(_cut(text, marks, name), values, key)


def _variables(raw: Raw | None) -> dict[str, str]:
    """Return the variables that `env` holds, written as a map or as words."""
    if raw is None:
        return {}
    try:
        return Settings.env.kind(raw)
    except ValueError as error:
        raise ConfigError(
            f"env is {masked_value('env', raw)!r}, {error}",
            where="the profile",
            fix="correct it first: `headway config edit`",
        ) from None


def _read(text: str) -> tuple[dict[str, Raw], dict[str, Mark]]:
    entries = parse_profile(text, "the profile", Layer.PROFILE)
    marks = {name: entry.mark for name, entry in entries.items() if entry.mark is not None}
    return {name: entry.raw for name, entry in entries.items()}, marks


def _put(text: str, marks: Mapping[str, Mark], name: str, raw: Raw) -> str:
    """Write `name: raw` into the map with keys at `marks`: over the old value, or at the end."""
    if name in marks:
        mark = marks[name]
        before, old = text[: mark.value], text[mark.value : mark.end].rstrip()
        if "\n" in text[mark.key : mark.value + len(old)]:  # write the new value beside its key
            colon, comments = _colon_and_comments(text, mark)
            line = text.rfind("\n", 0, mark.key) + 1
            margin = text[line : mark.key] if text[line : mark.key].isspace() else ""
            newline = "\r\n" if "\r\n" in text else "\n"
            above = "".join(f"{margin}{comment}{newline}" for comment in comments)
            before = text[:line] + above + text[line:colon] + " "
        return before + written(raw) + text[mark.value + len(old) :]
    entry = f"{_plain(name)}: {written(raw)}"
    if not marks:  # an empty flow map
        before, _, after = text.rpartition("}")
        return f"{before}{entry}}}{after}"
    last = max(marks.values(), key=lambda mark: mark.end)
    if _is_flow(text, marks):
        return text[: last.end] + f", {entry}" + text[last.end :]
    end = _line_end(text, last).start()
    indent = text[text.rfind("\n", 0, last.key) + 1 : last.key]
    newline = "\r\n" if "\r\n" in text else "\n"
    return text[:end] + newline + indent + entry + (text[end:] or newline)


def _colon_and_comments(text: str, mark: Mark) -> tuple[int, list[str]]:
    """Return the end of the colon after a key, and the comments from there to the value's end."""
    import yaml

    at, colon = mark.key, 0
    comments: list[str] = []
    for token in yaml.scan(
        text, Loader=yaml_loader()
    ):  # the reader's own loader, which accepts tabs
        start, end = token.start_mark.index, token.end_mark.index
        if mark.key <= start < mark.end:
            comments += re.findall(r"#[^\r\n]*", text[at:start]) if colon else []
            if not colon and isinstance(token, yaml.ValueToken):
                colon = end
            at = end
    return colon, [comment.rstrip() for comment in comments]


def _cut(text: str, marks: Mapping[str, Mark], name: str) -> str:
    """Remove `name` from the map with keys at `marks`; it is not the only key."""
    mark = marks[name]
    if _is_flow(text, marks):
        following = [other.key for other in marks.values() if other.key > mark.key]
        if following:
            return text[: mark.key] + text[min(following) :]
        before = max(other.end for other in marks.values() if other.key < mark.key)
        return text[:before] + text[mark.end :]
    return text[: text.rfind("\n", 0, mark.key) + 1] + text[_line_end(text, mark).end() :]


def _is_flow(text: str, marks: Mapping[str, Mark]) -> bool:
    first = min(mark.key for mark in marks.values())
    return text[:first].rstrip().endswith("{")


def _line_end(text: str, mark: Mark) -> re.Match[str]:
    """Find the end of the line on which the value at `mark` ends."""
    last = mark.value + len(text[mark.value : mark.end].rstrip())
    found = _LINE_END.search(text, last)
    assert found is not None
    return found


def written(raw: Raw) -> str:
    """Return `raw` as one line of YAML that every YAML reader reads as the same strings."""
    if isinstance(raw, Mapping):
        return "{" + ", ".join(f"{_plain(key)}: {_plain(text)}" for key, text in raw.items()) + "}"
    return _plain(raw) if isinstance(raw, str) else "[" + ", ".join(map(_plain, raw)) + "]"


def _plain(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _TRUTHS:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


def _checked(edited: str, expected: Mapping[str, Raw], key: str) -> str:
    """Parse `edited` again and check that only the change differs."""
    try:
        found = _read(edited)[0]
    except ConfigError:
        found = {}
    if found != expected:
        raise ConfigError(
            f"{key} cannot be changed without changing other parts of the profile",
            where="the profile's YAML formatting",
            fix="change it by hand: `headway config edit`",
        )
    return edited


def change_profile(
    path: str, change: Callable[[str], str], is_private: Callable[[str], bool] = lambda _: False
) -> str:
    """Replace the text of the profile at `path` by `change(text)`, and return the new text.

    Atomic: writers hold a lock on the folder; the text is written to a temporary file beside the
    profile, flushed to disk, and renamed to the profile. A link is followed, and an existing file
    keeps its permissions unless it becomes private.

    Args:
        path: of the profile; it and its folder need not exist.
        change: gets the present text, empty if the file does not exist.
        is_private: whether a file with this text is to be its owner's alone; one that was private
            before and has other permissions was given those by its owner.

    Raises:
        ConfigError: the folder cannot be written to, or the disk is full; or `change` raised it.
    """
    import tempfile

    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    temporary = None
    try:
        os.makedirs(folder, exist_ok=True)
        with _locked(folder):
            if os.path.islink(target):  # realpath stops at a loop of links
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            exists = os.path.exists(target)
            before = read_text(target) if exists else ""
            text = change(before)
            if exists and text == before:
                return text
            _refuse_to_write(target, text)
            becomes_private = is_private(text) and not (exists and is_private(before))
            mode = _OWNERS_ALONE if becomes_private else _mode_of(target if exists else None)
            prefix, suffix = _TEMPORARY
            handle, temporary = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=folder)
            with open(handle, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, target)
            temporary = None
            return text
    except OSError as error:
        raise ConfigError(
            f"the profile cannot be written: {error.strerror}",
            where=shown(target),
            fix=f"check that {shown(folder)} is a writable folder on a disk with free space, or "
            "set XDG_CONFIG_HOME",
        ) from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def _refuse_to_write(target: str, text: str) -> None:
    """Raise ConfigError if the text is too long to be read again, or the file is read-only."""
    if len(text.encode()) > MAX_BYTES:
        raise ConfigError(
            f"the profile would be larger than {MAX_BYTES // 2**20} MiB, the limit for reading it",
            where=shown(target),
            fix="shorten its values",
        )
    effective = os.access in os.supports_effective_ids
    if os.path.exists(target) and not os.access(target, os.W_OK, effective_ids=effective):
        raise ConfigError(
            "the profile is read-only",
            where=shown(target),
            fix=chmod_fix("u+w", target) or "select a profile that you may write",
        )


def _mode_of(file: str | None) -> int:
    """Return the permissions of a file; None: those that the user's new files get."""
    return 0o666 & ~_umask() if file is None else stat.S_IMODE(os.stat(file).st_mode)


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the folder's lock; at the end flush the folder's entries to disk."""
    if os.name == "nt":  # folders cannot be opened on Windows; os.replace is atomic by itself
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _remove_temporary_files(folder)
        yield
        os.fsync(handle)
    finally:
        os.close(handle)  # releases the lock


def _remove_temporary_files(folder: str) -> None:
    """Remove the temporary files of writers that were killed; called with the lock held."""
    prefix, suffix = _TEMPORARY
    for name in os.listdir(folder):
        if name.startswith(prefix) and name.endswith(suffix):
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))
