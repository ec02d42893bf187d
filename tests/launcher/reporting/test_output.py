"""What ranks write is shown line by line: folded and coloured on a terminal, plain elsewhere."""

from __future__ import annotations

import os
import pty
import random
import re
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.launcher.reporting import console
from headway.launcher.reporting.output import Output
from headway.launcher.run import wants_color


class Ranks:
    """Stand-ins for ranks that write into their pipes, and the screen or file behind it all."""

    def __init__(
        self, patch: pytest.MonkeyPatch, count: int, *, terminal: bool = True, **options: Any
    ) -> None:
        self._reading, writing = pty.openpty() if terminal else os.pipe()
        self._streams = [open(writing, "w"), open(os.dup(writing), "w")]  # noqa: SIM115
        patch.setattr(sys, "stdout", self._streams[0])
        patch.setattr(sys, "stderr", self._streams[1])
        folder = options.pop("folder", None)
        options = {"prefixed": True, "colored": False, "ranks": None, **options}
        self.output = Output(console.Console(**options), folder=folder)
        self._pipes: dict[tuple[int, int], int] = {}
        self.output.begin(0, range(count))
        for rank in range(count):
            ends = {target: os.pipe() for target in (1, 2)}
            self.output.add(rank, {target: end[0] for target, end in ends.items()})
            self._pipes |= {(rank, target): end[1] for target, end in ends.items()}
        self.seen = ""

    def write(self, rank: int, text: str, target: int = 1) -> None:
        """Let a rank write, and give the reader the time to read it."""
        os.write(self._pipes[rank, target], text.encode())
        time.sleep(0.005)

    def wait_for(self, text: str, timeout_s: float = 10) -> float:
        """Return the seconds until `text` is on the screen."""
        started = time.monotonic()
        while text not in self.seen:
            left_s = started + timeout_s - time.monotonic()
            assert select.select([self._reading], [], [], max(left_s, 0))[0], self.seen
            self.seen += os.read(self._reading, 65536).decode().replace("\r\n", "\n")
        return time.monotonic() - started

    def end(self) -> str:
        """Let all ranks end, and return all that was shown."""
        for fd in self._pipes.values():
            os.close(fd)
        self.output.close()
        self._streams[0].write("END")
        for stream in self._streams:
            stream.flush()
        self.wait_for("END")
        for stream in self._streams:
            stream.close()
        os.close(self._reading)
        return self.seen.removesuffix("END")


@pytest.fixture
def patient() -> Iterator[None]:
    """Let lines wait long, so that only what comes at once can come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "_MERGE_S", 60)
        yield


def test_a_line_of_all_ranks_is_shown_once_and_at_once(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 4)
    for rank in (2, 0, 3, 1):
        ranks.write(rank, "loading data\n")
    ranks.wait_for("[0-3] loading data\n")
    assert ranks.end() == "[0-3] loading data\n"


def test_a_line_of_some_ranks_names_them(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 4)
    for rank in (3, 0, 2):
        ranks.write(rank, "loading data\n")
    assert ranks.end() == "[0, 2-3] loading data\n"


def test_what_all_ranks_have_gone_past_is_not_held_back(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 2)
    ranks.write(0, "alone\nboth\n")
    ranks.write(1, "both\n")
    ranks.wait_for("[0] alone\n[0-1] both\n")
    ranks.end()


def test_a_line_of_one_rank_waits_a_tenth_of_a_second_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, 2)
    ranks.write(0, "mine\n")
    assert ranks.wait_for("[0] mine\n") < 1
    ranks.write(1, "mine\n")  # too late to be one with it
    assert ranks.end() == "[0] mine\n[1] mine\n"


def test_no_line_is_lost_or_changes_places_with_another_of_its_rank(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 3)
    drawn = random.Random(1)
    written: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for _ in range(300):
        rank = drawn.randrange(3)
        written[rank].append(drawn.choice("abc"))
        ranks.write(rank, written[rank][-1] + "\n")
    told: dict[int, list[str]] = {0: [], 1: [], 2: []}
    lines = ranks.end().splitlines()
    for line in lines:
        label, text = re.fullmatch(r"\[(.*)\] (.)", line).groups()  # type: ignore[union-attr]
        for part in label.split(", "):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                told[rank].append(text)
    assert told == written
    assert len(lines) < 270


def test_stdout_and_stderr_are_not_folded_into_each_other(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 2)
    ranks.write(0, "same\n")
    ranks.write(1, "same\n", target=2)
    assert ranks.end() == "[0] same\n[1] same\n"


def test_a_bar_comes_after_its_ranks_lines_and_stays_a_bar(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 2)
    ranks.write(0, "begin\n")
    for percent in (10, 20, 30):
        ranks.write(0, f"\r{percent}%", target=2)
    ranks.wait_for("30%")  # it stands still
    ranks.write(0, "\r100%\n", target=2)
    ranks.wait_for("100%\n")  # what is on the screen is finished there at once
    assert ranks.end() == "[0] begin\n[0] 10%\r[0] 20%\r[0] 30%\r[0] 100%\n"


def test_a_line_amid_a_bar_of_another_rank_gets_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, 2)
    ranks.write(0, "\r10%\r20%", target=2)
    ranks.wait_for("20%")
    ranks.write(1, "amid\n")
    ranks.wait_for("amid")
    ranks.write(0, "\r30%\n", target=2)
    assert ranks.end() == "[0] 10%\r[0] 20%\n[1] amid\n[0] 30%\n"


def test_a_question_is_shown_while_other_ranks_write_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2)
    ranks.write(0, "name? ")
    deadline = time.monotonic() + 5
    while "name?" not in ranks.seen and time.monotonic() < deadline:
        ranks.write(1, "busy\n")
        time.sleep(0.02)
        ranks.wait_for("busy")
        ranks.seen = ranks.seen.replace("busy", "")
    assert "[0] name? " in ranks.seen
    ranks.end()


def test_a_file_gets_every_line_of_every_rank_without_colours(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 2, terminal=False, colored=True)
    ranks.write(0, "same\n")
    ranks.write(1, "same\n")
    assert ranks.end() == "[0] same\n[1] same\n"


def test_each_rank_keeps_its_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2, colored=True)
    for line in ("a\n", "b\n"):
        ranks.write(0, "0" + line)
        ranks.write(1, "1" + line)
    shown = dict(re.findall(r"(\x1b\[\d+m)\[(\d)\]\x1b\[0m ", text := ranks.end()))
    assert sorted(shown.values()) == ["0", "1"]
    assert text.count("\x1b[0m ") == 4


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_colours_are_for_terminals_and_people_that_want_them(
    environ: dict[str, str], wanted: bool
) -> None:
    assert wants_color(environ) == wanted


def test_ranks_that_are_filtered_out_are_kept_in_log_and_tail(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 3, ranks=(1, 2), folder=".")
    for rank in range(3):
        ranks.write(rank, "step 1\n")
    ranks.wait_for("[1-2] step 1\n")  # the hidden one is not waited for
    ranks.write(0, "hidden")
    assert ranks.end() == "[1-2] step 1\n"
    assert ranks.output.tail(0) == ["step 1", "hidden"]
    assert Path("rank_0_attempt_0.log").read_text() == "step 1\nhidden"
