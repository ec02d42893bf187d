"""Records arrive as they were told, JSON is read as it was written, and nothing else is taken."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.ipc import records
from headway.ipc.typed import Lines, SchemaError, TooLong, encode, plain, read

GROUPS = (
    records.Group("0", (0, 1), (records.Collective(1, "all_reduce", "[4]", True, 1.5),)),
    records.Group("1", None, ()),
)
PLACE = records.Frame("/w/train.py", 3, "main")
RECORDS: list[Any] = [
    records.RankReady(),
    records.WillSave(),
    records.WillSave(False),
    records.OutputPath("checkpoints", "/saved"),
    records.ProgressSnapshot(3, "data"),
    records.StepStats(3, 2, 0.5, 0.1, 0.1, 0.1, 0.1, 0.0, 8, 100, None, 0, 0.25, 2, 0.01),
    records.StatusReply(GROUPS, records.ProgressSnapshot(), 7, ((PLACE, PLACE), (PLACE,))),
    records.Crash(1.5, "ValueError", "bo\nom \ud800", "Traceback ...", True, -2, GROUPS),
    records.ScriptEnd(2.0, 0),
    records.ScriptEnd(2.0, 3, "no data", PLACE, GROUPS),
    records.ServerReady(6),
    records.ProcessStart(7),
    records.StartFailed(11),
    records.ProcessExit(7, -9, 1.0, False),
]


def test_every_kind_of_record_arrives_as_it_was_told() -> None:
    assert {type(record) for record in RECORDS} == {*get_args(records.Record)}
    lines = b"".join(map(encode, RECORDS))
    assert lines.count(b"\n") == len(RECORDS)
    reader = records.RecordReader()  # to which they may come in parts
    assert [record for part in (lines[:9], lines[9:]) for record in reader.read(part)] == RECORDS


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"\xff\xfe\x00",
        b"7",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b"1" * 10_000,
        b'["Unknown"]',
        b'[["RankReady"]]',
        b'["RankReady", 1]',
        b'["ProcessStart"]',
        b'["ProcessStart", null]',
        b'["ProgressSnapshot", "1"]',
        encode(records.ScriptEnd(2.0, 0)._replace(time=10**400)),
        *(
            encode(record._replace(**{name: {"x": True}}))  # of another type
            for record in RECORDS
            for name in record._fields
        ),
    ],
)
def test_what_is_no_record_is_refused_and_raises_nothing(line: bytes) -> None:
    assert isinstance(records.decode_record(line), ValueError)


def test_a_line_that_is_too_long_is_refused_and_the_next_one_is_read() -> None:
    reader = records.RecordReader()
    assert [type(record) for record in reader.read(b"x" * (2**24 + 1))] == [TooLong]
    assert [*reader.read(encode(records.ProcessStart(7)))] == [records.ProcessStart(7)]


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
    with pytest.raises(SchemaError) as caught:
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
    assert [len(line) for line in lines.feed(b"\n")] == [1000 * 2**14]
