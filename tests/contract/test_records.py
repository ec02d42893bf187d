"""Records that ranks send: each arrives as it was told, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from headway.contract.records import (
    Answer,
    Collective,
    Crash,
    End,
    Ended,
    Figures,
    Frame,
    Group,
    Heartbeat,
    Kept,
    NotStarted,
    ProgressSnapshot,
    Ready,
    Record,
    RecordReader,
    Refused,
    Serving,
    Started,
    WillSave,
    decode_record,
)
from headway.contract.typed import encode

GROUPS = (
    Group("0", (0, 1), (Collective(1, "all_reduce", "[4]", True, 1.5),)),
    Group("1", None, ()),
)
PLACE = Frame("/w/train.py", 3, "main")
RECORDS: list[Any] = [
    Ready(),
    WillSave(),
    WillSave(False),
    Kept("checkpoints", "/saved"),
    Heartbeat(ProgressSnapshot(3, "data")),
    Figures(3, 2, 0.5, 0.1, 0.1, 0.1, 0.1, 0.0, 8, 100, None, 0, 0.25, 2, 0.01),
    Answer(GROUPS, ProgressSnapshot(), 7, ((PLACE, PLACE), (PLACE,))),
    Crash(1.5, "ValueError", "bo\nom \ud800", "Traceback ...", True, -2, GROUPS),
    End(2.0, 0),
    End(2.0, 3, "no data", PLACE, GROUPS),
    Serving(6),
    Started(7),
    NotStarted(11),
    Ended(7, -9, 1.0, False),
]


def test_every_kind_of_record_arrives_as_it_was_told() -> None:
    assert {type(record) for record in RECORDS} == {*get_args(Record)}
    lines = b"".join(map(encode, RECORDS))
    assert lines.count(b"\n") == len(RECORDS)
    reader = RecordReader()  # to which they may come in parts
    assert [one for part in (lines[:9], lines[9:]) for one in reader.read(part)] == RECORDS


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
        b'[["Ready"]]',
        b'["Ready", 1]',
        b'["Started"]',
        b'["Started", null]',
        b'["Heartbeat", [1]]',
        encode(End(2.0, 0)._replace(time=10**400)),
        *(
            encode(record._replace(**{name: {"x": True}}))  # of another type
            for record in RECORDS
            for name in record._fields
        ),
    ],
)
def test_what_is_no_record_is_refused_and_raises_nothing(line: bytes) -> None:
    assert isinstance(decode_record(line), Refused)


def test_a_line_that_is_too_long_is_refused_and_the_next_one_is_read() -> None:
    reader = RecordReader()
    assert [type(one) for one in reader.read(b"x" * (2**24 + 1))] == [Refused]
    assert [*reader.read(encode(Started(7)))] == [Started(7)]
