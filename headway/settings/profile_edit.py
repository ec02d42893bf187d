"""Edits profiles: changes one key in the text, and replaces the file atomically.

Comments and formatting are kept: only the text of one value is replaced, or whole lines are added
or removed. The result is parsed again, and refused where anything else has changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from headway.contract.notes import say
from headway.contract.origin import Layer, Origin
from headway.contract.precisions import PRECISIONS
from headway.contract.secrets import MASK, masked, masked_value
from headway.errors import ConfigError, UsageError
from headway.settings.profile import VERSION, compose, parse_profile
from headway.settings.profile_files import choose_profile, shown, text_at
from headway.settings.setting import Raw
from headway.settings.table import Settings

BLANK = f"version: {VERSION}\n"
_PROFILE = "the profile"
_PLAIN = re.compile(r"0|[1-9][0-9]{0,15}|[A-Za-z_/][A-Za-z0-9_/.+-]*")  # the same to all readers
_TRUTHS = {"y", "n", "yes", "no", "true", "false", "on", "off", "null"}  # to other YAML readers
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*\S", re.MULTILINE)

Pairs = Mapping[str, tuple[Any, Any]]
"""The nodes of a map, by key: the key's and the value's."""


def is_blank(text: str) -> bool:
    """Return whether the text contains only comments."""
    lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines())
    return all(not line or line.startswith("#") for line in lines)


def set_value(text: str, key: str, raw: Raw) -> str:
    """Return the profile `text` with `key`, a setting or `env.NAME`, set and all else as it was.

    Raises:
        ConfigError: the key cannot be changed without changing other text.
    """
    values, pairs = _read(text)
    name, _, item = key.partition(".")
    if not item:
        return _checked(_put(text, pairs, name, raw), {**values, name: raw}, key)
    variables = {**_variables(values.get(name)), item: str(raw)}
    items = _block_of(pairs, name)
    edited = _put(text, items, item, raw) if items else _put(text, pairs, name, variables)
    return _checked(edited, {**values, name: variables}, key)


def unset_value(text: str, key: str) -> str:
    """Return the profile `text` without `key` and the comment on its line.

    Raises:
        ConfigError: the key cannot be changed without changing other text.
        KeyError: the key does not exist.
    """
    values, pairs = _read(text)
    name, _, item = key.partition(".")
    if item and name != "env":
        raise KeyError(key)
    rest = _variables(values[name]) if item else {}
    if item:
        del rest[item]
    if rest:
        items = _block_of(pairs, name)
        edited = _cut(text, items, item) if items else _put(text, pairs, name, rest)
        return _checked(edited, {**values, name: rest}, key)
    if not pairs.keys() - {name}:  # a profile must not become empty
        text = _put(text, pairs, "version", str(VERSION))
        values, pairs = _read(text)
    del values[name]
    return _checked(_cut(text, pairs, name), values, key)


def _variables(raw: Raw | None) -> dict[str, str]:
    """Return the variables that `env` holds, written as a map or as words."""
    if raw is None:
        return {}
    try:
        return Settings.env.kind(raw)
    except ValueError as error:
        raise ConfigError(
            f"env is {masked_value('env', raw)!r}, {error}",
            where=_PROFILE,
            fix="correct it first: `$EDITOR $(headway config path)`",
        ) from None


def _read(text: str) -> tuple[dict[str, Raw], Pairs]:
    """Return what a profile says, without its version, and where each key and value stands."""
    entries = parse_profile(text, _PROFILE, Layer.PROFILE)
    values = {name: entry.raw for name, entry in entries.items()}
    return values, _pairs(compose(text, Origin(Layer.PROFILE, _PROFILE)))


def _pairs(node: Any) -> Pairs:
    return {key.value: (key, value) for key, value in node.value}


def _block_of(pairs: Pairs, name: str) -> Pairs:
    """Return the items of a map with one on each line; empty for any other value."""
    node = pairs[name][1] if name in pairs else None
    return _pairs(node) if node and node.id == "mapping" and not node.flow_style else {}


def _put(text: str, pairs: Pairs, name: str, raw: Raw) -> str:
    """Write `name: raw` into a map: over the old value, or below the last one."""
    newline = "\r\n" if "\r\n" in text else "\n"
    if name in pairs:
        key, value = pairs[name]
        start, end = key.end_mark.index, _end(text, value)
        if "\n" not in text[start:end]:
            return text[: value.start_mark.index] + written(raw) + text[end:]
        # the new value stands beside its key, comments between the old lines above it
        line = _line_start(text, start)
        margin = text[line : key.start_mark.index]
        old = text[start : value.start_mark.index if value.id == "scalar" else end]
        above = [f"{margin}{comment}{newline}" for comment in _COMMENT.findall(old)]
        return "".join([text[:line], *above, text[line:start], ": ", written(raw), text[end:]])
    first = min((key.start_mark.index for key, _ in pairs.values()), default=0)
    margin = text[_line_start(text, first) : first]
    end = _line_end(text, max((_end(text, value) for _, value in pairs.values()), default=0))
    before = text[:end] if text[:end].endswith("\n") else text[:end] + newline
    return f"{before}{margin}{_plain(name)}: {written(raw)}{newline}{text[end:]}"


def _cut(text: str, pairs: Pairs, name: str) -> str:
    """Remove the lines of `name`, which is not the only key."""
    key, value = pairs[name]
    start = _line_start(text, key.start_mark.index)
    return text[:start] + text[_line_end(text, _end(text, value)) :]


def _end(text: str, node: Any) -> int:
    """Return where a value ends; the parser has the end of a block at what follows it."""
    start: int = node.start_mark.index
    if node.id != "scalar" and not node.flow_style:
        last = node.value[-1]
        return _end(text, last[1] if node.id == "mapping" else last)
    return start + len(text[start : node.end_mark.index].rstrip())


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_end(text: str, at: int) -> int:
    """Return where the line after the one at `at` begins."""
    return text.find("\n", at) + 1 or len(text)


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
            fix="change it by hand: `$EDITOR $(headway config path)`",
        )
    return edited


def masked_profile(text: str) -> str:
    """Return a profile's `text` with the secrets in its `env` masked, line by line."""
    if is_blank(text):
        return text
    parse_profile(text, _PROFILE, Layer.PROFILE)
    root = compose(text, Origin(Layer.PROFILE, _PROFILE))
    secrets = [one for key, env in root.value if key.value == "env" for one in _secrets(env)]
    for node in reversed(secrets):
        start, end = node.start_mark.index, _end(text, node)
        breaks = "\n" * text.count("\n", start, end)
        text = f'{text[:start]}"{MASK}"{breaks}{text[end:]}'
    return text


def _secrets(env: Any) -> list[Any]:
    """Return the nodes that hold a secret: a variable's value, or words as a whole."""
    if env.id == "mapping":
        return [value for key, value in env.value if masked(key.value, value.value) != value.value]
    words = env.value if env.id == "scalar" else [item.value for item in env.value]
    return [env] if masked_value("env", words) != words else []


def _has_secrets(text: str) -> bool:
    with suppress(ConfigError):  # the file that names the selected profile is none itself
        return masked_profile(text) != text
    return False


def change_profile(path: str, change: Callable[[str], str]) -> str:
    """Replace the text of the profile at `path` by `change(text)`, and return the new text.

    It is written to a file beside the profile, which is then renamed: a reader finds the old text
    or the new one. A link is followed. A new profile, and one that holds secrets, is its owner's
    alone; another keeps its permissions.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    before, exists = text_at(target), os.path.exists(target)
    text = change(before)
    if exists and text == before:
        return text
    temporary = f"{target}.{os.getpid()}.tmp"
    try:
        if exists:
            os.close(os.open(target, os.O_WRONLY))  # fails where it is read-only
        os.makedirs(folder, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        if exists and not _has_secrets(text):
            shutil.copymode(target, temporary)
        elif exists and os.stat(target).st_mode & 0o077:
            say(f"{shown(target)} holds a secret: only you can read it now")
        os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise ConfigError(
            f"the profile cannot be written: {error.strerror}",
            where=shown(target),
            fix=f"check the permissions of the file, and that {shown(folder)} is a writable folder "
            "on a disk with free space, or set XDG_CONFIG_HOME",
        ) from None
    return text


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a profile for `headway launch` that sets the precision and leaves all else to `auto`.

    Args:
        mixed_precision: `no`, `fp16` or `bf16`.
        save_location: the file; without it the profile that is selected.

    Returns:
        The file; False where there was one already, which stays as it is.

    Raises:
        UsageError: there is no such precision.
        ConfigError: the file cannot be written.

    Examples:
        >>> from headway.utils import write_basic_config
        >>> write_basic_config("bf16", "headway.yaml").name
        'headway.yaml'
    """
    if mixed_precision.lower() not in PRECISIONS:
        raise UsageError(
            f"mixed_precision is {mixed_precision!r}, not one of {', '.join(PRECISIONS)}",
            where="the script's write_basic_config(...)",
            fix="pass mixed_precision='bf16', or another of them",
        )
    path = Path(choose_profile().path if save_location is None else save_location)
    if path.exists():
        say(f"{path} is there already, and stays as it is; `headway config` changes it")
        return False
    line = f"mixed_precision: {written(mixed_precision.lower())}\n"
    change_profile(str(path), lambda _: line)
    return path
