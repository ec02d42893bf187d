"""What is written as JSON is read back as it was, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import pytest

from headway.contract.typed import Misfit, plain, read


class Kind(Enum):
    A = 1


class Part(NamedTuple):
    name: str
    size: float = 0.0


class Whole(NamedTuple):
    kind: Kind
    parts: tuple[Part, ...]
    pair: tuple[int, str] | None = None
    by_name: Mapping[str, Part] = {}


WHOLE = Whole(Kind.A, (Part("x", 1.5), Part("y")), (1, "one"), {"z": Part("z")})


def test_what_is_written_is_read_back() -> None:
    assert read(Whole, json.loads(json.dumps(plain(WHOLE)))) == WHOLE
    assert read(Part, json.loads(json.dumps(Part("x")))) == Part("x")  # as json writes a tuple
    assert read(Whole, {"kind": "A", "parts": []}) == Whole(Kind.A, ())


@pytest.mark.parametrize(
    ("place", "data"),
    [
        ("", []),
        ("", 7),
        ("", {"kind": "A"}),
        ("", {"kind": "A", "parts": [], "more": 1}),
        ("kind", {"kind": "B", "parts": []}),
        ("parts", {"kind": "A", "parts": "x"}),
        ("parts[1].size", {"kind": "A", "parts": [["x", 1], {"name": "y", "size": True}]}),
        ("pair", {"kind": "A", "parts": [], "pair": [1, "one", 2]}),
        ("pair[0]", {"kind": "A", "parts": [], "pair": [True, "one"]}),
        ("by_name['z'].name", {"kind": "A", "parts": [], "by_name": {"z": {"name": None}}}),
    ],
)
def test_what_is_of_another_type_is_refused_with_its_place(place: str, data: Any) -> None:
    with pytest.raises(Misfit) as caught:
        read(Whole, data)
    assert caught.value.place == place
