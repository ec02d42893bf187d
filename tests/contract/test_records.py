"""Records that ranks send: each arrives as it was told, and nothing else is taken for one."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import pytest

from headway.contract.records import (
    Answer,
    Collective,
    Crash,
    End,
    Ended,
    Frame,
    Group,
    Heartbeat,
    MemoryUse,
    NotStarted,
    Progress,
    Ready,
    Record,
    RecordReader,
    Refused,
    Serving,
    Started,
    WillSave,
    decode_record,
    encode_record,
)

GROUPS = (
    Group("0", (0, 1), (Collective(1, "all_reduce", "[4]", True, 1.5),)),
    Group("1", None, ()),
)
PLACE = Frame("/w/train.py", 3, "main")
RECORDS: list[Any] = [
    Ready(),
    WillSave(),
    Heartbeat(Progress(3, "data")),
    Answer(1.5, GROUPS, Progress(), 7, ((PLACE, PLACE), (PLACE,)), True),
    Crash(1.5, "ValueError", "bo\nom \ud800", "Traceback ...", True, -2, GROUPS),
    End(2.0, 0),
    End(2.0, 3, "no data", PLACE, GROUPS),
    End(2.0, 0, memory=MemoryUse(3, 4)),
    Serving(6),
    Started(7),
    NotStarted(11),
    Ended(7, -9, 1.0, False),
]


def test_every_kind_of_record_arrives_as_it_was_told() -> None:
    assert {type(record) for record in RECORDS} == {*get_args(Record)}
    lines = b"".join(map(encode_record, RECORDS))
    assert lines.count(b"\n") == len(RECORDS)
    assert [*RecordReader().read(lines)] == RECORDS


def test_a_record_that_has_come_in_part_waits_for_its_rest() -> None:
    line = encode_record(Started(7))
    reader = RecordReader()
    assert [*reader.read(line[:9])] == []
    assert [*reader.read(line[9:] + line[:9])] == [Started(7)]
    assert [*reader.read(line[9:])] == [Started(7)]


def changed(record: Record, /, **fields: object) -> bytes:
    return json.dumps({**json.loads(encode_record(record)), **fields}).encode()


def without(record: Record, field: str) -> bytes:
    fields = json.loads(encode_record(record))
    del fields[field]
    return json.dumps(fields).encode()


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
        changed(Ready(), record="Unknown"),
        changed(Ready(), record=["Ready"]),
        changed(Ready(), version=2),
        without(Ready(), "version"),
        changed(Ready(), more=1),
        without(Started(7), "pid"),
        changed(Started(7), pid="7"),
        changed(Started(7), pid=True),
        changed(Started(7), pid=None),
        changed(Heartbeat(Progress()), progress=[1]),
        changed(Heartbeat(Progress()), progress=[1, "data", 2]),
        changed(End(2.0, 0), exited_at="x.py:3"),
        changed(End(2.0, 0), groups=[["0", [0, "1"], []]]),
        changed(End(2.0, 0), groups=None),
    ],
)
def test_what_is_no_record_is_refused_and_raises_nothing(line: bytes) -> None:
    assert isinstance(decode_record(line), Refused)


def test_a_line_without_an_end_is_given_up() -> None:
    reader = RecordReader()
    assert [type(one) for one in reader.read(b"x" * (2**24 + 1))] == [Refused]
    assert [*reader.read(encode_record(Started(7)))] == [Started(7)]


def test_one_long_line_in_small_parts_takes_time_in_proportion_to_its_length() -> None:
    reader, began = RecordReader(), time.monotonic()
    for _ in range(2**14):
        assert [*reader.read(b"x" * 1000)] == []
        assert time.monotonic() - began < 5
    assert [type(one) for one in reader.read(b"\n")] == [Refused]
    assert [*reader.read(encode_record(Started(7)))] == [Started(7)]
