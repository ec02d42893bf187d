"""Editing of profiles: change one key in the text, and replace the file atomically.

An edit replaces a value on the line of its key, or adds or removes a line. The result is parsed
again; an error is raised if anything else changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from headway.errors import Code, ConfigError, UsageError
from headway.ipc.choices import PRECISIONS
from headway.ipc.origin import Layer, Origin
from headway.ipc.secrets import MASK, masked, masked_value
from headway.ipc.stderr import log
from headway.settings.profile import VERSION, choose_profile, compose, parse_profile, shown, text_at
from headway.settings.setting import Raw
from headway.settings.table import Settings

BLANK = f"version: {VERSION}\n"
_PROFILE = "the profile"
_PLAIN = re.compile(r"0|[1-9][0-9]{0,15}|[A-Za-z_/][A-Za-z0-9_/.+-]*")  # safe in all YAML parsers
_TRUTHS = {"y", "n", "yes", "no", "true", "false", "on", "off", "null"}  # not text in other parsers
_BY_HAND = "edit the file: `$EDITOR $(headway config path)`"


def is_blank(text: str) -> bool:
    """Return whether the text contains only comments."""
    lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines())
    return all(not line or line.startswith("#") for line in lines)


def set_value(text: str, key: str, raw: Raw) -> str:
    """Return the profile `text` with `key`, a setting or `env.NAME`, set to `raw`.

    Raises ConfigError if the value spans several lines or the file is not plain `key: value` lines.
    """
    values, pairs = _read(text)
    name, _, item = key.partition(".")
    if item:
        raw = {**_variables(values.get(name)), item: str(raw)}
    if name in pairs:
        start, end = _place(text, pairs[name], key)
        edited = text[:start] + written(raw) + text[end:]
    else:
        newline = "\r\n" if "\r\n" in text else "\n"
        edited = f"{text.rstrip()}{newline}{_plain(name)}: {written(raw)}{newline}"
    return _checked(edited, {**values, name: raw}, key)


def unset_value(text: str, key: str) -> str:
    """Return the profile `text` without `key`, a setting or `env.NAME`.

    Raises ConfigError as `set_value` does, and KeyError if the key does not exist.
    """
    values, pairs = _read(text)
    name, _, item = key.partition(".")
    if item and name != "env":
        raise KeyError(key)
    if item:
        rest = _variables(values[name])
        del rest[item]
        if rest:
            return set_value(text, name, rest)
    if not pairs.keys() - {name}:  # a profile must not become empty
        text = f"{text.rstrip()}\n{BLANK}"
        values, pairs = _read(text)
    del values[name]
    start, end = _place(text, pairs[name], key)
    above, below = text.rfind("\n", 0, start) + 1, text.find("\n", end) + 1 or len(text)
    return _checked(text[:above] + text[below:], values, key)


def _variables(raw: Raw | None) -> dict[str, str]:
    """Parse the value of `env`, a map or NAME=VALUE words."""
    if raw is None:
        return {}
    try:
        return Settings.env.parser(raw)
    except ValueError as error:
        what = f"invalid value {masked_value('env', raw)!r} for env: {error}"
        raise ConfigError(what, where=_PROFILE, fix=_BY_HAND, code=Code.BAD_VALUE) from None


def _read(text: str) -> tuple[dict[str, Raw], Mapping[str, tuple[Any, Any]]]:
    """Return a profile's values, without the version, and the nodes of its keys and values."""
    entries = parse_profile(text, _PROFILE, Layer.PROFILE)
    values = {name: entry.raw for name, entry in entries.items()}
    root = compose(text, Origin(Layer.PROFILE, _PROFILE))
    return values, {key.value: (key, value) for key, value in root.value}


def _place(text: str, nodes: tuple[Any, Any], key: str) -> tuple[int, int]:
    """Return the start and end of the value of `key` on its line."""
    start, end = _span(text, nodes[1])
    if "\n" in text[nodes[0].start_mark.index : end]:
        what = f"cannot change {key}: its value spans several lines"
        raise ConfigError(what, where=_PROFILE, fix=_BY_HAND, code=Code.EDIT_BY_HAND)
    return start, end


def _span(text: str, node: Any) -> tuple[int, int]:
    """Return the start and end of a value, without a block's trailing blank lines."""
    start: int = node.start_mark.index
    return start, start + len(text[start : node.end_mark.index].rstrip())


def written(raw: Raw) -> str:
    """Return `raw` as a line of YAML that every YAML parser converts to the same strings."""
    if isinstance(raw, Mapping):
        return "{" + ", ".join(f"{_plain(key)}: {_plain(text)}" for key, text in raw.items()) + "}"
    return _plain(raw) if isinstance(raw, str) else "[" + ", ".join(map(_plain, raw)) + "]"


def _plain(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _TRUTHS:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


def _checked(edited: str, expected: Mapping[str, Raw], key: str) -> str:
    """Return `edited` if it parses to `expected`; raise ConfigError otherwise."""
    try:
        found = _read(edited)[0]
    except ConfigError:
        found = {}
    if found != expected:
        raise ConfigError(
            f"cannot change {key} without changing other parts of the profile",
            where=_PROFILE,
            fix=_BY_HAND,
            code=Code.EDIT_BY_HAND,
        )
    return edited


def masked_profile(text: str) -> str:
    """Return a profile's `text` with secrets in `env` masked and line numbers unchanged."""
    if is_blank(text):
        return text
    _, pairs = _read(text)
    for node in reversed(_secrets(pairs["env"][1]) if "env" in pairs else []):
        start, end = _span(text, node)
        breaks = "\n" * text.count("\n", start, end)
        text = f'{text[:start]}"{MASK}"{breaks}{text[end:]}'
    return text


def _secrets(env: Any) -> list[Any]:
    """Return the nodes with secrets: values of a map, or `env` itself if it consists of words."""
    if env.id == "mapping":
        return [value for key, value in env.value if masked(key.value, value.value) != value.value]
    words = env.value if env.id == "scalar" else [item.value for item in env.value]
    return [env] if masked_value("env", words) != words else []


def write_profile(path: str, text: str) -> None:
    """Write a new or existing profile at `path`.

    The file is replaced atomically; links are followed. New profiles and profiles with secrets are
    readable only by their owner; other profiles keep their permissions.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    exists = os.path.exists(target)
    if exists and text == text_at(target):
        return
    temporary = f"{target}.{os.getpid()}.tmp"
    try:
        if exists:
            os.close(os.open(target, os.O_WRONLY))  # fails if the file is read-only
        os.makedirs(folder, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        if exists and masked_profile(text) == text:
            shutil.copymode(target, temporary)
        elif exists and os.stat(target).st_mode & 0o077:
            log(f"{shown(target)} contains a secret: removed read access for other users")
        os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise ConfigError(
            f"cannot write the profile: {error.strerror}",
            where=shown(target),
            fix=f"make sure that the file and the folder {shown(folder)} are writable and that the "
            "disk has free space, or set XDG_CONFIG_HOME",
            code=Code.UNWRITABLE,
        ) from None


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a profile for `headway launch` that sets only the precision.

    Args:
        mixed_precision: `no`, `fp16` or `bf16`.
        save_location: The file to write. Defaults to the selected profile.

    Returns:
        The path of the written file, or False if the file already exists and was left unchanged.

    Raises:
        UsageError: The precision is unknown.
        ConfigError: The file cannot be written.

    Examples:
        >>> from headway.utils import write_basic_config
        >>> write_basic_config("bf16", "headway.yaml").name
        'headway.yaml'
    """
    if mixed_precision.lower() not in PRECISIONS:
        raise UsageError(
            f"invalid value {mixed_precision!r} for mixed_precision: must be one of "
            + ", ".join(PRECISIONS),
            where="the script's write_basic_config(...)",
            fix="pass a supported precision, such as mixed_precision='bf16'",
            code=Code.BAD_ARGUMENT,
        )
    path = Path(choose_profile().path if save_location is None else save_location)
    if path.exists():
        log(f"{path} already exists and is unchanged; use `headway config` to change it")
        return False
    write_profile(str(path), f"mixed_precision: {written(mixed_precision.lower())}\n")
    return path
