"""Read the map in a YAML or JSON file, with every scalar as its text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from headway.contract.typed import parse
from headway.errors import ConfigError


def read_map(text: str, where: str) -> dict[str, Any]:
    """Return the map in a YAML or JSON text; empty if it is something else.

    Raises:
        ConfigError: it is neither, has a duplicate key, or has a YAML anchor, alias or tag.
    """
    import yaml

    try:
        if text.lstrip().startswith("{"):
            found = _as_texts(parse(text))
        else:
            # not the C loader: deep nesting would overflow its stack
            node = yaml.compose(text, Loader=yaml.BaseLoader)
            events: Iterable[Any] = yaml.parse(text, Loader=yaml.BaseLoader)
            for event in events:
                _reject_indirection(event, isinstance(event, yaml.AliasEvent))
            found = _texts_at(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"not valid YAML or JSON: {' '.join(str(error).split())}",
            where=where,
            fix="pass a file that `accelerate config` wrote, or a `torchrun ...` command line",
        ) from None
    return found if isinstance(found, dict) else {}


def _reject_indirection(event: Any, is_alias: bool) -> None:
    """Raise where a value would not be the text in the file."""
    line = event.start_mark.line + 1
    if is_alias or getattr(event, "anchor", None):
        raise ValueError(f"line {line} has a YAML anchor (&) or alias (*)")
    if getattr(event, "tag", None):
        raise ValueError(f"line {line} has a YAML tag ({event.tag})")


def _texts_at(node: Any) -> Any:
    """Return the data of a YAML node, with every scalar as its text."""
    if node is None or isinstance(node.value, str):
        return node and node.value
    if node.id == "mapping":
        return _unique([(_texts_at(key), _texts_at(value)) for key, value in node.value])
    return [_texts_at(item) for item in node.value]


def _unique(pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise ValueError("a key is a list or a map, not text")
        if key in found:
            raise ValueError(f"duplicate key {key!r}")
        found[key] = value
    return found


def _as_texts(value: Any) -> Any:
    """Return JSON data with every scalar as YAML would write it."""
    if isinstance(value, dict):
        return {key: _as_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_texts(item) for item in value]
    return value if isinstance(value, str) else json.dumps(value)
