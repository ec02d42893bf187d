"""What comes in parts is split into lines, none of which is longer than it may be."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.contract.typed import Lines, TooLong


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
