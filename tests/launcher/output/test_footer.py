"""A line below what a terminal shows, drawn on a screen; no rank is started."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator

import pyte
import pytest
from tqdm import tqdm

from headway.launcher.output import sinks
from headway.launcher.output.console import StatusLine
from headway.launcher.output.sinks import Footer, Sink
from tests.waiting import wait_until


class Screen:
    """A pseudo-terminal, of which what was written is drawn."""

    def __init__(self, rows: int = 6, columns: int = 40) -> None:
        self.master, self.slave = os.openpty()
        os.set_blocking(self.master, False)
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        import fcntl
        import struct
        import termios

        size = struct.pack("4H", rows, columns, 0, 0)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)
        self._screen.resize(rows, columns)

    def lines(self) -> list[str]:
        """Return the lines that are shown now, without empty ones at the end."""
        try:
            while True:
                self._stream.feed(os.read(self.master, 65536))
        except BlockingIOError:
            pass
        shown = [line.rstrip() for line in self._screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def cursor(self) -> tuple[int, int]:
        return self._screen.cursor.y, self._screen.cursor.x


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setattr(Footer, "_is_in_foreground", lambda _: True)
    made = Screen()
    yield made
    os.close(made.master)
    os.close(made.slave)


@pytest.fixture
def sink(screen: Screen) -> Iterator[Sink]:
    made = Sink(screen.slave, True, lambda: None)
    yield made
    made.close()


def shows(screen: Screen, *lines: str) -> None:
    deadline = time.monotonic() + 120
    while (shown := screen.lines()) != [*lines]:
        assert time.monotonic() < deadline, shown
        time.sleep(0.01)


def test_the_line_stays_below_what_ranks_write(screen: Screen, sink: Sink) -> None:
    sink.show((0, 1), b"one\n", b"")
    sink.show_footer("step 1")
    shows(screen, "one", "step 1")
    sink.show((0, 1), b"two\n", b"")
    shows(screen, "one", "two", "step 1")
    sink.show_footer("step 2")
    shows(screen, "one", "two", "step 2")
    for number in range(8):  # scrolls
        sink.show((0, 1), f"line {number}\n".encode(), b"")
    shows(screen, *[f"line {number}" for number in range(3, 8)], "step 2")
    sink.show_footer("")
    assert sink.wait(time.monotonic() + 60)
    shows(screen, *[f"line {number}" for number in range(3, 8)])


@pytest.mark.parametrize("above", [0, 10])
def test_a_progress_bar_moves_above_the_line(screen: Screen, sink: Sink, above: int) -> None:
    before = [f"line {number}" for number in range(above)]
    sink.show((0, 1), "".join(f"{line}\n" for line in before).encode(), b"")
    kept = before[-4:]
    sink.show_footer("step 1")
    for percent in (10, 20):
        sink.show((0, 2), f"\r{percent}% done".encode(), b"")
        shows(screen, *kept, f"{percent}% done", "step 1")
        assert screen.cursor == (len(kept), 8)
    sink.show((0, 2), b"\r100% done\n", b"")
    shows(screen, *kept, "100% done", "step 1")


def test_the_line_is_below_a_bar_of_tqdm_and_gives_way_to_one_inside_it(
    screen: Screen, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shown(io.StringIO):
        def write(self, text: str) -> int:
            sink.show((0, 2), text.encode(), b"")
            return len(text)

    def bar(name: str, place: int) -> tqdm[int]:
        return tqdm(
            range(2),
            name,
            leave=place == 0,
            file=Shown(),
            ncols=30,
            mininterval=0,
            position=place,
        )

    def shows_names(*names: str) -> None:
        wait_until(lambda: [line.partition(":")[0] for line in screen.lines()] == [*names])

    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread
    sink.show_footer("step: 1")
    outer = bar("outer", 0)
    shows_names("outer", "step")
    for _ in outer:
        for _ in bar("inner", 1):
            shows_names("outer", "inner")
    shows_names("outer", "step")


def test_a_prompt_has_the_terminal_for_itself(screen: Screen, sink: Sink) -> None:
    sink.show_footer("step 1")
    shows(screen, "step 1")
    sink.show((0, 1), b"(Pdb) ", b"")
    shows(screen, "(Pdb)")
    os.write(screen.slave, b"c\r\n")  # as the terminal echoes what is typed
    sink.show((0, 1), b"goes on\n", b"")
    wait_until(lambda: screen.lines()[-1] == "step 1")
    shown = screen.lines()
    assert shown[0] == "(Pdb) c"
    assert "goes on" in shown


def test_clear_and_a_narrower_terminal_leave_no_torn_line(screen: Screen, sink: Sink) -> None:
    sink.show((0, 1), b"one\n", b"")
    sink.show_footer("a line of thirty characters...")
    shows(screen, "one", "a line of thirty characters...")
    sink.show((0, 1), b"\x1b[H\x1b[2Jtwo\n", b"")
    shows(screen, "two", "a line of thirty characters...")
    screen.resize(6, 20)
    sink.show_footer("a line of thirty characters...")
    shows(screen, "two", "a line of thirty ch")


def test_a_narrow_terminal_shows_the_step_and_the_slow_rank_and_no_half_of_the_rest(
    screen: Screen, sink: Sink
) -> None:
    screen.resize(6, 80)
    shares = "71 % compute, 24 % data, 5 % sync"
    step, rest = "step 1240/5000", "812 samples/s  1:12 left  slowest: rank 5 (+38 ms, data)"
    sink.show_footer(f"{step}  {shares}  {rest}")
    shows(screen, f"{step}  {rest}")
    screen.resize(6, 50)
    sink.show_footer(f"{step}  {shares}  {rest}")
    shows(screen, f"{step}  slowest: rank 5 (+38 ms, data)")
    sink.show_footer(f"{step}  {shares}  812 samples/s")
    shows(screen, f"{step}  812 samples/s")


def test_lines_at_full_speed_stay_whole(screen: Screen, sink: Sink) -> None:
    sink.show_footer("step 1")
    for number in range(2000):
        sink.show((number % 8, 1), f"line {number}\n".encode(), b"")
        if number % 100 == 0:
            sink.show_footer(f"step {number}")
            screen.lines()
    shows(screen, *[f"line {number}" for number in range(1995, 2000)], "step 1900")


def test_a_shell_has_the_terminal_for_itself_while_the_run_is_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen()
    footer = Footer(screen.slave)
    footer.text = "step 1"
    assert footer.draw() == b""  # it is not even this process's own terminal
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
    assert b"step 1" in footer.draw()
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    assert footer.draw() == b""


class Console:
    """Keeps what is shown."""

    def __init__(self, *, has_terminal: bool) -> None:
        self.has_terminal = has_terminal
        self.footers: list[str] = []
        self.lines: list[str] = []

    def show_footer(self, text: str) -> None:
        self.footers.append(text)

    def warn(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("has_terminal", "line", "footers", "lines"),
    [
        (True, "step 1", 111, 0),
        (False, "step 1", 0, 2),
        (False, "", 0, 0),  # no rank tells of steps
    ],
)
def test_the_line_is_below_a_terminal_from_the_tenth_second_and_once_a_minute_in_a_file(
    monkeypatch: pytest.MonkeyPatch,
    has_terminal: bool,
    line: str,
    footers: int,
    lines: int,
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    console = Console(has_terminal=has_terminal)
    status = StatusLine(console, lambda: line)  # type: ignore[arg-type]
    for second in range(121):
        status.show_due(float(second))
    assert (len(console.footers), len(console.lines)) == (footers, lines)


def test_a_stream_that_is_no_terminal_has_no_line_below() -> None:
    read, write = os.pipe()
    sink = Sink(write, False, lambda: None)
    sink.show_footer("step 1")
    sink.show((0, 1), b"one\n", b"")
    assert sink.wait(time.monotonic() + 60)
    time.sleep(2 * sinks._REDRAW_S)
    assert os.read(read, 100) == b"one\n"
    sink.close()
    os.close(read)
    os.close(write)
