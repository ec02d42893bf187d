"""The JSON schema of profiles, derived from the settings table, and the comment that names it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from headway.errors import ConfigError
from headway.settings.profile import VERSION
from headway.settings.profile_edit import BLANK, change_profile, is_blank
from headway.settings.profile_files import user_folder
from headway.settings.setting import AUTO, Count, Setting, Shape
from headway.settings.table import TABLE

_FILE = "schema.json"


def schema_text() -> str:
    """Return the JSON schema (draft 7) of a profile."""
    version = {"const": VERSION, "description": "the version of this format"}
    return (
        json.dumps(
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "title": "Headway profile",
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "version": version,
                    **{n: _property(row) for n, row in TABLE.items()},
                },
            },
            indent=2,
        )
        + "\n"
    )


def _property(row: Setting[Any]) -> dict[str, Any]:
    kind = _kind(row)
    if row.default == AUTO and not row.choices:
        kind = {"anyOf": [kind, {"const": AUTO}]}
    if row.default is not None and row.shape is not Shape.MAP:
        kind["default"] = row.default if isinstance(row.default, int) else str(row.default)
    return {"description": row.help, **kind}


def _kind(row: Setting[Any]) -> dict[str, Any]:
    if row.choices:
        return {"enum": list(row.choices)}
    if isinstance(row.kind, Count):
        highest = {} if row.kind.maximum is None else {"maximum": row.kind.maximum}
        number = {"type": "integer", "minimum": row.kind.minimum, **highest}
        if row.kind.pattern:
            return {"anyOf": [number, {"type": "string", "pattern": row.kind.pattern}]}
        return number
    if row.shape is Shape.LIST:
        one = {"type": ["integer", "string"]}
        return {"anyOf": [one, {"type": "array", "items": one}]}
    if row.shape is Shape.MAP:
        value = {"type": ["string", "number", "boolean"]}
        words = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
        return {"anyOf": [{"type": "object", "additionalProperties": value}, *words]}
    return {"type": "string"}


def new_profile(path: str) -> str:
    """Return the text of an empty profile at `path`; its comment tells editors the schema."""
    folder = user_folder()
    beside = os.path.realpath(os.path.dirname(path)) == os.path.realpath(folder)
    file = _FILE if beside else os.path.join(folder, _FILE)  # editors do not expand ~
    return f"# yaml-language-server: $schema={file}\n{BLANK}"


def with_header(text: str, path: str) -> str:
    """Return a profile's text; an empty one, or comments alone, with the header added."""
    if not text.strip():
        return new_profile(path)
    return f"{text.rstrip()}\n{BLANK}" if is_blank(text) else text


def write_schema() -> None:
    """Write the schema beside the user's profiles; failures are ignored: only editors need it."""
    with suppress(ConfigError):
        change_profile(os.path.join(user_folder(), _FILE), lambda _: schema_text())
