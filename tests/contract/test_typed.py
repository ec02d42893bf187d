"""What is written as JSON is read back as it was, and nothing else is; a line has a limit."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.contract.typed import Lines, Misfit, TooLong, plain, read


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


@given(st.lists(st.binary(max_size=50)))
def test_lines_are_the_same_in_whatever_pieces_they_come(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    lines = Lines(len(whole))
    found = [line for piece in pieces for line in lines.feed(piece)]
    assert found == whole.split(b"\n")[:-1]
    assert lines.has_part == bool(whole.split(b"\n")[-1])


@pytest.mark.parametrize("data", [b"x" * 9, b"x" * 9 + b"\n", b"12345678\n" + b"x" * 9])
def test_a_line_that_is_too_long_is_refused_and_dropped(data: bytes) -> None:
    lines = Lines(8)
    with pytest.raises(TooLong):
        list(lines.feed(data))
    assert [*lines.feed(b"next\n")] == [b"next"]


def test_one_long_line_in_small_parts_takes_time_in_proportion_to_its_length() -> None:
    lines, began = Lines(2**24), time.monotonic()
    for _ in range(2**14):
        assert [*lines.feed(b"x" * 1000)] == []
        assert time.monotonic() - began < 20
    assert [len(one) for one in lines.feed(b"\n")] == [1000 * 2**14]
