"""What ranks write is shown line by line: folded and coloured on a terminal, plain elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import re
import select
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.launcher.output import console, views
from headway.launcher.output.console import wants_color
from headway.launcher.output.pipes import Output


class Ranks:
    """Stand-ins for ranks that write into their pipes, and the screen or file behind it all."""

    def __init__(
        self, patch: pytest.MonkeyPatch, count: int, *, terminal: bool = True, **options: Any
    ) -> None:
        self._reading, writing = pty.openpty() if terminal else os.pipe()
        self._is_terminal = terminal
        self._errors, error = os.pipe() if options.pop("has_own_stderr", False) else (-1, -1)
        error = os.dup(writing) if error < 0 else error
        self._streams = [open(writing, "w"), open(error, "w")]  # noqa: SIM115
        patch.setattr(sys, "stdout", self._streams[0])
        patch.setattr(sys, "stderr", self._streams[1])
        folder = options.pop("folder", None)
        options = {"prefixed": True, "colored": False, "ranks": None, **options}
        self.console = console.Console(**options)
        self.output = Output(self.console, folder=folder)
        self.pipes: dict[tuple[int, int], int] = {}
        self.output.begin(0, range(count))
        for rank in range(count):
            ends = {target: os.pipe() for target in (1, 2)}
            self.output.add(rank, {target: end[0] for target, end in ends.items()})
            self.pipes |= {(rank, target): end[1] for target, end in ends.items()}
        self.seen = ""
        _running.append(self)

    def write(self, rank: int, text: str, target: int = 1) -> None:
        """Let a rank write, and wait until it has been read."""
        fd = self.pipes[rank, target]
        os.write(fd, text.encode(errors="surrogateescape"))
        while fcntl.ioctl(fd, termios.FIONREAD, bytes(4)) != bytes(4):
            time.sleep(0.001)

    def write_until_blocked(self, rank: int, text: str) -> int:
        """Write lines until the pipe has been full for a while; return how many bytes it took."""
        fd = self.pipes[rank, 1]
        os.set_blocking(fd, False)
        data, count = text.encode() * 1000, 0
        while select.select([], [fd], [], 0.5)[1]:
            with suppress(BlockingIOError):
                count += os.write(fd, data[count % len(data) :])
        return count

    def read_stderr(self) -> str:
        """Wait for something on a stderr of its own, and return it."""
        assert select.select([self._errors], [], [], 60)[0]
        return os.read(self._errors, 65536).decode()

    def wait_for(self, text: str) -> None:
        """Wait until `text` is on the screen."""
        deadline = time.monotonic() + 60
        while text not in self.seen:
            left_s = deadline - time.monotonic()
            assert select.select([self._reading], [], [], max(left_s, 0))[0], self.seen[-1000:]
            self._read()

    def close(self) -> None:
        _running.remove(self)
        for stream in self._streams:
            stream.close()
        for fd in {self._reading, self._errors} - {-1}:
            os.close(fd)

    def _read(self) -> None:
        text = os.read(self._reading, 65536).decode()
        self.seen += text.replace("\r\n", "\n") if self._is_terminal else text

    def end(self) -> str:
        """Let all ranks end, and return all that was shown."""
        for fd in self.pipes.values():
            os.close(fd)
        closing = threading.Thread(target=self.output.close)
        closing.start()
        while closing.is_alive():  # it waits for a reader
            if select.select([self._reading], [], [], 0.01)[0]:
                self._read()
        closing.join()
        self._streams[0].write("END")
        for stream in self._streams:
            stream.flush()
        self.wait_for("END")
        self.close()
        return self.seen.removesuffix("END")


Start = Callable[..., Ranks]
_running: list[Ranks] = []


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start stand-ins for so many ranks; end what a failed test has left."""
    yield partial(Ranks, monkeypatch)
    for ranks in [*_running]:
        ranks.end()


def test_no_line_is_lost_torn_or_changes_places_with_another_of_its_stream(start: Start) -> None:
    ranks = start(3)
    drawn = random.Random(1)
    written: dict[str, list[str]] = {"0": [], "1": [], "2": []}
    for number in range(100):
        rank = drawn.randrange(3)
        ranks.write(rank, f"{number} ")
        ranks.write(rank, "line\n")
        written[str(rank)].append(f"{number} line")
    shown: dict[str, list[str]] = {"0": [], "1": [], "2": []}
    for label, text in re.findall(r"\[(.)\] (.*)\n", ranks.end()):
        shown[label].append(text)
    assert shown == written


def test_a_character_whose_bytes_come_late_is_not_cut_by_another_ranks_line(start: Start) -> None:
    ranks = start(2)
    ranks.write(0, "caf\udcc3")  # the first byte of an e with an accent
    ranks.wait_for("caf")
    ranks.write(1, "other\n")
    ranks.write(0, "\udca9\n")
    assert ranks.end() == "[0] caf\n[1] other\n[0] \xe9\n"


def test_a_bar_comes_after_its_ranks_lines_and_stays_a_bar(start: Start) -> None:
    ranks = start(2)
    ranks.write(0, "begin\n")
    for percent in (10, 20, 30):
        ranks.write(0, f"\r{percent}%", target=2)
    ranks.wait_for("30%")  # it stands still
    ranks.write(0, "\r100%\n", target=2)
    assert ranks.end() == "[0] begin\n[0] 10%\r[0] 20%\r[0] 30%\r[0] 100%\n"


def test_a_line_amid_a_bar_of_another_rank_gets_a_line_of_its_own(start: Start) -> None:
    ranks = start(2)
    ranks.write(0, "\r10%\r20%", target=2)
    ranks.wait_for("20%")
    ranks.write(1, "amid\n")
    ranks.wait_for("amid")
    ranks.write(0, "\r30%\n", target=2)
    assert ranks.end() == "[0] 10%\r[0] 20%\n[1] amid\n[0] 30%\n"


def test_a_question_is_shown_while_other_ranks_write_on(start: Start) -> None:
    ranks = start(2)
    ranks.write(0, "name? ")
    deadline = time.monotonic() + 60
    while "name?" not in ranks.seen and time.monotonic() < deadline:
        ranks.write(1, "busy\n")
        time.sleep(0.02)
        ranks.wait_for("busy")
        ranks.seen = ranks.seen.replace("busy", "")
    assert "[0] name? " in ranks.seen
    ranks.end()


@pytest.mark.parametrize("prefix", ["", "[0] "])
def test_what_comes_after_the_run_begins_a_line_where_a_rank_left_one_unfinished(
    prefix: str, start: Start
) -> None:
    ranks = start(2, prefixed=bool(prefix))
    ranks.write(0, "loading ...")
    ranks.wait_for("loading")
    assert ranks.end() == f"{prefix}loading ...\n"


def test_each_rank_keeps_its_colour_on_a_terminal_and_a_file_has_none(start: Start) -> None:
    shown = []
    for terminal in (True, False):
        ranks = start(2, terminal=terminal, colored=True)
        for line in ("a\n", "b\n"):
            ranks.write(0, "0" + line)
            ranks.write(1, "1" + line, target=1 if terminal else 2)
        shown.append(ranks.end())
    on_terminal, in_file = shown
    colors = dict(re.findall(r"(\x1b\[\d+m)\[(\d)\]\x1b\[0m ", on_terminal))
    assert sorted(colors.values()) == ["0", "1"]
    assert on_terminal.count("\x1b[0m ") == 4
    assert sorted(in_file.splitlines()) == ["[0] 0a", "[0] 0b", "[1] 1a", "[1] 1b"]


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


def test_ranks_that_are_filtered_out_are_kept_in_log_and_tail(start: Start) -> None:
    ranks = start(2, ranks=(1,), folder=".")
    for rank in range(2):
        ranks.write(rank, "step 1\n")
    ranks.write(0, "hidden")
    assert ranks.end() == "[1] step 1\n"
    assert ranks.output.tail(0) == ["step 1", "hidden"]
    assert Path("rank_0_attempt_0.log").read_text() == "step 1\nhidden"


MEMORY = 4 * 2**20
"""More than the launcher and two pipes of Linux hold of one rank's lines without their prefixes."""


def test_an_unread_stdout_holds_up_the_rank_that_writes_and_costs_little_memory(
    start: Start,
) -> None:
    ranks = start(2, terminal=False)
    line = "x" * 99 + "\n"
    count = ranks.write_until_blocked(0, line)
    assert count < MEMORY
    now = time.monotonic()
    assert ranks.output.last_output_at >= now  # waiting for a reader is no hang
    ranks.wait_for("[0] " + line)
    lines = ranks.end().splitlines()
    assert "".join(line.removeprefix("[0] ") for line in lines) == ("x" * 99) * (count // 100) + (
        "x" * (count % 100)
    )
    assert {len(line) for line in lines[:-1]} == {103}


def test_stderr_is_shown_though_stdout_is_not_read(start: Start) -> None:
    ranks = start(2, terminal=False, has_own_stderr=True)
    ranks.write_until_blocked(0, "x\n")
    ranks.write(1, "problem\n", target=2)
    assert ranks.read_stderr() == "[1] problem\n"
    ranks.end()


def test_at_the_end_an_unread_stdout_is_waited_for_no_longer_than_allowed(start: Start) -> None:
    ranks = start(2, terminal=False, has_own_stderr=True)
    ranks.write_until_blocked(0, "x\n")
    for fd in ranks.pipes.values():
        os.close(fd)
    ranks.output.close(0.2)
    assert re.search(r"stdout was not read for 0.2 s: \d+ bytes were lost", ranks.read_stderr())
    assert ranks.output.tail(0) == ["x"] * 120
    assert not ranks.console.has_lost_output
    ranks.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show an unfinished line soon, and the next state of a bar late."""
    monkeypatch.setattr(views, "_FILE_DELAY_S", 0.05)
    monkeypatch.setattr(views, "_BAR_INTERVAL_S", 60)


@pytest.mark.parametrize(
    ("between", "shown"),
    [
        ("", "[0] loading ... done\n[0] next\n"),
        ("hello\n", "[0] loading ...\n[1] hello\n[0]  done\n[0] next\n"),
    ],
)
def test_an_unfinished_line_in_a_file_goes_on_unless_another_rank_writes(
    between: str, shown: str, soon: None, start: Start
) -> None:
    ranks = start(2, terminal=False)
    ranks.write(0, "loading ...")
    ranks.wait_for("[0] loading ...")
    ranks.write(1, between)
    ranks.wait_for(between)
    ranks.write(0, " done\nnext\n")
    assert ranks.end() == shown


def test_a_bar_in_a_file_is_seen_soon_then_rarely_and_at_its_end(soon: None, start: Start) -> None:
    ranks = start(2, terminal=False, folder=".")
    states = [f"\r{percent}%" for percent in range(100)]
    ranks.write(0, states[0])
    ranks.wait_for("[0] 0%\n")
    for state in states[1:]:
        ranks.write(0, state)
    ranks.write(1, "other\n")
    ranks.write(0, "\r100%\nnext\n")
    assert ranks.end() == "[0] 0%\n[1] other\n[0] 100%\n[0] next\n"
    written = "".join(states) + "\r100%\nnext\n"
    assert Path("rank_0_attempt_0.log").read_bytes() == written.encode()


@pytest.mark.parametrize("form", ["\r{}%", "{}%\r"])
def test_the_last_state_of_a_bar_that_stands_still_is_shown_in_its_turn(
    form: str, soon: None, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "_BAR_INTERVAL_S", 0.2)
    ranks = start(2, terminal=False)
    for percent in (1, 2, 3):
        ranks.write(0, form.format(percent))
    ranks.wait_for("[0] 3%\n")
    ranks.write(0, form.format(4))
    ranks.wait_for("[0] 4%\n")
    assert ranks.end() == "[0] 3%\n[0] 4%\n"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("10%\r20%\r30%\r\n", "[0] 30%\n"),  # print(end="\\r")
        ("\r10%\r20%", "[0] 20%\n"),  # the rank ends
        ("\r99%\r100%\r    \r", "[0] 100%\n"),  # tqdm(leave=False)
        ("\r10%\r   \rsaved\n\r11%", "[0] saved\n[0] 11%\n"),  # tqdm.write
        ("a\r\n\r\nb\r\n", "[0] a\r\n[0] \r\n[0] b\r\n"),  # no bar, but ends of lines
        ("a\n\n\r1%\nb\n", "[0] a\n[0] \n[0] 1%\n[0] b\n"),
        ("\r1%\r2%\n\r1%\r2%\n", "[0] 2%\n[0] 2%\n"),
        # tqdm in tqdm
        ("\ra1\n\rb1\x1b[A\n\rb2\x1b[A\n\rb3\x1b[A\ra2\n", "[0] a1\n[0] a2\n"),
        ("\ra1\n\n\rc1\x1b[A\x1b[A\n\n\rc2\x1b[A\x1b[A", "[0] a1\n[0] \n[0] c2\n"),
        ("loss 0.5 \x1b[A tail\n", "[0]  tail\n"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_a_bar_leaves_in_a_file(
    written: str, shown: str, at_once: bool, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "_FILE_DELAY_S", 60)
    ranks = start(2, terminal=False)
    for part in [written] if at_once else written:
        ranks.write(0, part)
    assert ranks.end() == shown


def test_raw_output_is_passed_on_byte_by_byte(start: Start) -> None:
    ranks = start(2, terminal=False, prefixed=False, is_raw=True)
    ranks.write(0, "\r1%\r2%")
    ranks.wait_for("\r1%\r2%")
    ranks.write(1, "a\n", target=2)
    ranks.write(0, "\r3%\n")
    assert ranks.end() == "\r1%\r2%a\n\r3%\n"


def test_on_a_terminal_one_bar_moves_and_the_others_only_end(start: Start) -> None:
    ranks = start(3)
    for percent in range(0, 100, 10):
        for rank in (0, 1, 2):
            ranks.write(rank, f"\r{percent}%", target=2)
        ranks.wait_for(f"{percent}%")
    for rank in (0, 1, 2):
        ranks.write(rank, "\r100%\n", target=2)
    shown = ranks.end()
    assert shown.startswith("[0] 0%\r[0] 10%\r[0] 20%\r")
    assert [piece for piece in re.split(r"[\r\n]+", shown) if not piece.startswith("[0] ")] == [
        *("[1] 100%", "[2] 100%", "")
    ]


def test_torchs_rank_is_not_repeated_after_ours(start: Start) -> None:
    ranks = start(2, terminal=False)
    ranks.write(1, "[rank1]: Traceback\n[rank1]:   File\n\n[rank0]: of another\n", target=2)
    ranks.write(1, "[rank1]: [rank1]: after two groups\n", target=2)
    ranks.write(1, "[rank1]: a word of the script\n")
    assert ranks.end() == (
        "[1] Traceback\n[1]   File\n[1] \n[1] [rank0]: of another\n[1] after two groups\n"
        "[1] [rank1]: a word of the script\n"
    )
    alone = start(1, terminal=False, prefixed=False)
    alone.write(0, "[rank0]: Traceback\n", target=2)
    assert alone.end() == "[rank0]: Traceback\n"


def test_a_full_disk_under_the_logs_is_told_once_and_loses_nothing_else(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Output, "_log_path", lambda *_: "/dev/full")
    ranks = start(2, terminal=False, folder="logs")
    for rank in (0, 1):
        ranks.write(rank, "line\n")
    shown = ranks.end()
    assert sorted(shown.splitlines())[:2] == ["[0] line", "[1] line"]
    assert shown.count("No space left on device") == 1
    assert ranks.output.is_incomplete


def test_what_the_launcher_itself_prints_is_a_line_of_its_own_and_never_blocks(
    soon: None, start: Start
) -> None:
    ranks = start(2, terminal=False)
    with ranks.console.capture_stderr():
        ranks.write(0, "loading ...")
        ranks.wait_for("loading ...")
        print("headway: note", file=sys.stderr)
        ranks.wait_for("note\n")
        ranks.write(0, "done\n")
        ranks.wait_for("done\n")
        assert ranks.seen == "[0] loading ...\nheadway: note\n[0] done\n"
        ranks.write_until_blocked(0, "x\n")
        print("y" * 2**20, file=sys.stderr)
    ranks.end()
