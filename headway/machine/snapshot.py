"""Machine snapshots as JSON: written by `headway env --json`, read by `--machine`."""

from __future__ import annotations

import json
from typing import Any

from headway.errors import Code, ConfigError
from headway.ipc.typed import SchemaError, plain, read
from headway.machine.facts import Machine

VERSION = 1
MAX_BYTES = 2**24


def as_data(machine: Machine) -> dict[str, Any]:
    return {"version": VERSION, **plain(machine)}


def to_json(machine: Machine) -> str:
    return json.dumps(as_data(machine), indent=2)


def load_machine(path: str) -> Machine:
    """Load the machine from a file written by `headway env --json`."""
    key = ""
    try:
        with open(path, encoding="utf-8") as file:
            return _read(json.loads(file.read(MAX_BYTES)))
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except SchemaError as invalid:
        key = invalid.place
        reason = f"is not a valid machine snapshot: {invalid}"
    except (ValueError, RecursionError) as error:
        reason = f"is not a valid machine snapshot: {error}"
    raise ConfigError(
        f"{path!r} {reason}",
        where=f"flag --machine, {path}" + f", key {key}" * bool(key),
        fix="create one with `headway env --json > machine.json` on that machine",
        code=Code.UNREADABLE,
    )


def _read(data: Any) -> Machine:
    version = data.pop("version", None) if isinstance(data, dict) else None
    if type(version) is not int or version != VERSION:
        raise SchemaError(
            "version", f"is {version!r}, but this version of Headway reads format {VERSION}"
        )
    return read(Machine, data)
