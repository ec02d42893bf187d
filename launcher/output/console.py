"""Writes the ranks' lines to the launcher's stdout and stderr, with prefixes and colors."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, redirect_stderr
from typing import TextIO

from headway.ipc.stderr import flush_streams, line_of
from headway.launcher.output.sinks import Sink

_NOTICE_S = 1.0  # before a wait for a reader is reported
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # SGR codes, without red, the color of errors
_NAMES = {1: "stdout", 2: "stderr"}
_FOOTER_DELAY_S, _FOOTER_INTERVAL_S = 10.0, 1.0  # on a terminal
_LINE_INTERVAL_S = 60.0  # elsewhere
_NEVER = float("inf")


class Console:
    """The launcher's stdout and stderr, which all ranks share.

    After `begin`, only one thread may use the console. If `ranks` is set, only these ranks are
    shown. If `is_raw` is set, all bytes are forwarded unchanged. If `is_ansi` is set, the terminal
    supports ANSI cursor movements.
    """

    def __init__(
        self,
        *,
        prefixed: bool,
        colored: bool,
        ranks: Collection[int] | None,
        is_raw: bool = False,
        is_ansi: bool = False,
    ) -> None:
        self.is_raw = is_raw
        self.on_change: Callable[[], None] = lambda: None
        self.is_prefixed = prefixed
        self._colored = colored
        self._ranks = ranks
        flush_streams()  # a sink reports an error later
        self._fds = {1: sys.stdout.fileno(), 2: sys.stderr.fileno()}
        out = Sink(self._fds[1], sys.stdout.isatty(), lambda: self.on_change())
        error = out
        if not os.path.sameopenfile(self._fds[1], self._fds[2]):
            error = Sink(self._fds[2], sys.stderr.isatty(), lambda: self.on_change())
        self._sinks = {1: out, 2: error}
        terminals = (sink for sink in (error, out) if sink.is_terminal)
        self._footer_sink = next(terminals, None) if is_ansi and not is_raw else None
        self._lost: set[Sink] = set()
        self.first_rank = 0  # the lowest shown rank; a terminal animates its progress bar

    def begin(self, ranks: Iterable[int]) -> None:
        self.first_rank = min(filter(self.is_shown, ranks), default=0)

    def capture_stderr(self) -> AbstractContextManager[object]:
        """Redirect `sys.stderr` to the queue of the ranks' output, so that writes do not block."""
        return redirect_stderr(_StderrQueue(self._log, sys.stderr))

    def is_shown(self, rank: int) -> bool:
        return self._ranks is None or rank in self._ranks

    @property
    def has_terminal(self) -> bool:
        return self._footer_sink is not None

    def show_footer(self, text: str) -> None:
        """Show or replace the line below all output on a terminal; an empty string removes it."""
        if self._footer_sink is not None:
            self._footer_sink.show_footer(text)

    def is_terminal(self, target: int) -> bool:
        return self._sinks[target].is_terminal

    def is_full(self, target: int) -> bool:
        """Return whether the queue is full, so that the ranks must wait for the reader."""
        return self._sinks[target].is_full

    def has_no_reader(self, target: int) -> bool:
        """Return whether the reader has disconnected; ranks then receive SIGPIPE, as usual."""
        return isinstance(self._sinks[target].error, BrokenPipeError)

    @property
    def lost_reader(self) -> str:
        return " and ".join(_NAMES[target] for target in self._fds if self.has_no_reader(target))

    @property
    def has_lost_output(self) -> bool:
        errors = [sink.error for sink in self._lost]
        return any(error and not isinstance(error, BrokenPipeError) for error in errors)

    def forward(self, target: int, data: bytes) -> None:
        self._sinks[target].forward(data)

    def write(self, rank: int, target: int, text: bytes, *, is_new: bool = False) -> None:
        """Show lines of a rank's stdout (1) or stderr (2); the last line may be unfinished.

        The text continues an unfinished line, unless `is_new` is set.
        """
        sink = self._sinks[target]
        prefix = self._prefix(rank, sink) if self.is_prefixed else b""
        sink.show((rank, target), text, prefix, is_new=is_new)

    def discard_unread(self, timeout_s: float) -> None:
        """Discard the output for streams that failed or have accepted no data for `timeout_s`."""
        for sink in {*self._sinks.values()} - self._lost:
            if sink.error is not None:
                self._drop(sink)
                if not isinstance(sink.error, BrokenPipeError):
                    cause = sink.error.strerror
                    self.warn(f"the ranks' output could not be written and is lost: {cause}")
            elif (since := sink.blocked_since) and time.monotonic() - since >= timeout_s:
                lost = sink.discard()
                self._drop(sink)
                name = self._name(sink)
                self.warn(f"{name} was not read for {timeout_s:g} s: {lost} bytes were lost")

    def wait_s(self, timeout_s: float) -> float:
        """Return the time until `discard_unread` must be called, unless a stream fails earlier."""
        times = [sink.blocked_since for sink in self._sinks.values()]
        now = time.monotonic()
        return min((since + timeout_s - now for since in times if since), default=_NEVER)

    def close(self, timeout_s: float) -> None:
        """Wait for all writes; discard output for streams that accept no data for `timeout_s`."""
        self.show_footer("")
        for sink in {*self._sinks.values()}:
            sink.end_line()
            if not sink.wait(time.monotonic() + min(_NOTICE_S, timeout_s)):
                self.warn(f"waiting for {self._name(sink)} to be read")
            while not sink.wait(time.monotonic() + max(0, self.wait_s(timeout_s))):
                self.discard_unread(timeout_s)
        self.discard_unread(timeout_s)
        for sink in {*self._sinks.values()}:
            sink.close()

    def _log(self, text: str) -> None:
        """Print the launcher's lines on stderr, or on stdout if stderr has failed."""
        is_lost = self._sinks[2].error is not None or self._sinks[2] in self._lost
        self._sinks[1 if is_lost else 2].log(text)

    def warn(self, line: str) -> None:
        """Print a line from the launcher on stderr, or on stdout if nothing reads stderr."""
        for target in (2, 1):
            sink = self._sinks[target]
            since = sink.blocked_since
            is_stuck = since is not None and time.monotonic() - since >= _NOTICE_S
            if sink not in self._lost and sink.error is None and not is_stuck:
                sink.log(line_of(line))
                return

    def _name(self, sink: Sink) -> str:
        return " and ".join(_NAMES[target] for target, s in self._sinks.items() if s is sink)

    def _drop(self, sink: Sink) -> None:
        """Redirect a failed stream to /dev/null, or stderr to stdout, so that it can be flushed."""
        self._lost.add(sink)
        null = os.open(os.devnull, os.O_WRONLY)
        for target, other in self._sinks.items():
            if other is sink:
                is_left = target == 2 and self._sinks[1] not in self._lost
                os.dup2(self._fds[1] if is_left else null, self._fds[target])
        os.close(null)

    def _prefix(self, rank: int, sink: Sink) -> bytes:
        label = f"[{rank}]"
        if self._colored and sink.is_terminal:
            label = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{label}\x1b[0m"
        return f"{label} ".encode()


def wants_color(environ: Mapping[str, str]) -> bool:
    """Return whether NO_COLOR and TERM allow colors; see no-color.org."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


class StatusLine:
    """Shows the run's status in one line: the text that `describe` returns, unless it is empty.

    On a terminal, the line is a footer that appears after ten seconds. Elsewhere, the line is
    printed once per minute. Only the thread that reads the ranks' output uses this class.
    """

    def __init__(self, console: Console, describe: Callable[[], str]) -> None:
        self._console = console
        self._describe = describe
        self._has_footer = console.has_terminal
        self._interval_s = _FOOTER_INTERVAL_S if self._has_footer else _LINE_INTERVAL_S
        self.due = time.monotonic() + (_FOOTER_DELAY_S if self._has_footer else self._interval_s)

    def show_due(self, now: float) -> None:
        if now < self.due:
            return
        self.due = now + self._interval_s
        line = self._describe()
        if self._has_footer:
            self._console.show_footer(line)
        elif line:
            self._console.warn(line)


class _StderrQueue(io.TextIOBase):
    """Replaces `sys.stderr` while the ranks' output is shown, and writes only whole lines."""

    def __init__(self, log: Callable[[str], None], usual: TextIO) -> None:
        self._log = log
        self._usual = usual
        self._unfinished: dict[int, str] = {}  # by thread

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        lines, newline, rest = (self._unfinished.pop(thread, "") + text).rpartition("\n")
        if newline:
            self._log(lines + newline)
        if rest:
            self._unfinished[thread] = rest
        return len(text)

    def fileno(self) -> int:
        return self._usual.fileno()

    def isatty(self) -> bool:
        return self._usual.isatty()
