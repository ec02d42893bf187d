"""The agent of an ssh launch: it runs on each host and starts a launch there.

The agent reads its orders from standard input, so that command lines contain no secrets. It stops
the launch when the input ends, because the caller has then exited.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from headway.commands.main import described
from headway.errors import Code, HeadwayError, LaunchError
from headway.ipc import signals
from headway.ipc.forking import die_with_parent, reap, wake_on_child_exit
from headway.ipc.run_contract import KEY_VARIABLE
from headway.ipc.stderr import flush_streams
from headway.ipc.typed import decode, encode
from headway.launcher.remote.protocol import (
    AgentSetup,
    HostReply,
    LaunchEnd,
    Signal,
    StartLaunch,
    remote_env,
)

_CHUNK_BYTES = 1 << 16
_BEAT_EVERY_S = 30.0  # heartbeat, so that sshd notices a broken connection


def main() -> None:
    """Read the orders from standard input, reply, and run the requested launch."""
    lines = _Lines(0)
    first = lines.wait()
    if first is None:
        return
    order = decode(AgentSetup, first)
    mark = lines.mark = order.mark.encode()
    _answer(mark + encode(probe_host(order, os.environ)))
    if (line := lines.wait()) is not None:
        start: StartLaunch = decode(StartLaunch, line)
        _answer(mark + encode(_run(start, order.variables, lines)))


def probe_host(order: AgentSetup, environ: Mapping[str, str]) -> HostReply:
    """Change to the order's working directory; return this host's address, or the problem.

    The launches themselves check that all machines agree.
    """
    try:
        os.chdir(order.folder)
        if order.script is not None:
            os.stat(order.script)
    except OSError as error:
        return HostReply(problem=f"{error.filename or order.folder}: {error.strerror}")
    # sshd(8): address and port of the client, then of the server
    caller, _, address, *_ = environ.get("SSH_CONNECTION", "").split() or [""] * 3
    with socket.create_server(("", 0)) as server:
        return HostReply("", address, server.getsockname()[1], caller)


class _Lines:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.has_ended = False
        self.mark = b""  # prefix of replies; empty until the order arrives
        self._rest = b""

    def wait(self) -> bytes | None:
        """Return the next line; None at the end of the input."""
        while b"\n" not in self._rest and not self.has_ended:
            self.select([self.fd], None)
            self._read()
        line, newline, rest = self._rest.partition(b"\n")
        if not newline:
            return None
        self._rest = rest
        return line

    def select(self, watched: Sequence[int], until: float | None) -> Sequence[int]:
        """Return the descriptors that are readable before `until`; send heartbeats meanwhile."""
        while True:
            left_s = float("inf") if until is None else max(0.0, until - time.monotonic())
            ready = select.select(watched, [], [], min(left_s, _BEAT_EVERY_S))[0]
            if ready or left_s <= _BEAT_EVERY_S:
                return ready
            if self.mark and select.select([], [1], [], 0)[1]:
                _answer(self.mark + b"\n")

    def arrived(self) -> Iterator[bytes]:
        self._read()
        *lines, self._rest = self._rest.split(b"\n")
        yield from lines

    def _read(self) -> None:
        data = os.read(self.fd, _CHUNK_BYTES)
        self.has_ended = not data
        self._rest += data


def _answer(line: bytes) -> None:
    with suppress(OSError):  # the caller has exited, so the input ends, too
        sys.stdout.flush()
        while line:
            line = line[os.write(1, line) :]


def _run(start: StartLaunch, variables: Mapping[str, str], lines: _Lines) -> LaunchEnd:
    """Run the launch in a child process, forward the caller's signals, and return the result."""
    woken, _ = wake_on_child_exit()
    reading, writing = os.pipe()
    agent, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(agent)
        _launch(start, variables, writing)
    os.close(writing)
    reports: list[bytes] = []
    kill_at: float | None = None
    is_killed = False
    watched = [lines.fd, woken, reading]
    while True:
        ready = lines.select(watched, kill_at)
        if woken in ready:
            os.read(woken, _CHUNK_BYTES)
        if reading in ready:
            reports.append(os.read(reading, _CHUNK_BYTES))
            if not reports[-1]:
                watched.remove(reading)
        for pid, status in reap() if woken in ready else ():
            if pid == child:
                report = _rest_of(reading, reports) or _kill_reason(status, is_ours=is_killed)
                return LaunchEnd(signals.shell_exit_code(os.waitstatus_to_exitcode(status)), report)
        if not ready:
            os.kill(child, signal.SIGKILL)
            kill_at, is_killed = None, True
        if lines.fd in ready:
            stops = [decode(Signal, line).number for line in lines.arrived()]
            if lines.has_ended:
                watched.remove(lines.fd)
                stops.append(signal.SIGTERM)
            for number in stops:
                os.kill(child, number)
                kill_at = time.monotonic() + start.stops_within_s


def _rest_of(reading: int, reports: list[bytes]) -> str:
    """Return the child's report, including the part that has not been read yet."""
    os.set_blocking(reading, False)
    with suppress(BlockingIOError):
        while data := os.read(reading, _CHUNK_BYTES):
            reports.append(data)
    return b"".join(reports).decode(errors="replace")


def _kill_reason(status: int, *, is_ours: bool) -> str:
    """Return a report if a signal killed the launcher; otherwise an empty string."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return ""
    host = socket.gethostname()
    what = f"the launcher on {host} was killed by signal {-code} ({signal.strsignal(-code)})"
    fix = "find out what killed it: a user, or the kernel's OOM killer (see `dmesg`)"
    if is_ours:
        what, fix = f"the launcher on {host} was killed at the deadline", "see its output"
    return described(LaunchError(what, where=f"host {host}", fix=fix, code=Code.SSH))


def _launch(start: StartLaunch, variables: Mapping[str, str], report_to: int) -> NoReturn:
    """Launch in this process and exit; send errors to the caller instead of printing them."""
    signal.set_wakeup_fd(-1)
    signals.reset_handlers(signal.SIGCHLD)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    there = remote_env(os.environ, variables)
    os.environ.clear()
    os.environ.update({**there, KEY_VARIABLE: start.key})
    exit_code = 1
    try:
        from headway.commands.launch import main as launch

        exit_code = launch(start.words)
    except HeadwayError as error:
        exit_code = error.exit_code
        os.write(report_to, described(error).encode())
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:
        exit_code = 130
    except BaseException:  # noqa: BLE001  a bug, reported as Python does
        sys.excepthook(*sys.exc_info())
    finally:
        flush_streams()
        os._exit(exit_code)


if __name__ == "__main__":
    main()
