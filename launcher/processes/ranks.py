"""Manages the ranks of one machine in one attempt: starts and stops them, and opens their pipes."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException

from headway.ipc.forking import ProcessHandle
from headway.ipc.records import Crash, ProcessExit
from headway.ipc.run_contract import epoch_time
from headway.ipc.stderr import SILENT_S, log, named
from headway.launcher.diagnosis.failures import RankExit
from headway.launcher.diagnosis.hang import RankStatus
from headway.launcher.diagnosis.reasons import is_communication_error
from headway.launcher.diagnosis.stacks import read_state
from headway.launcher.diagnosis.watch import RankChannel, Watch
from headway.launcher.multinode.messages import Failed
from headway.launcher.output.pipes import FAILURE_UNREAD_TIMEOUT_S, UNREAD_TIMEOUT_S, Output
from headway.launcher.processes.shutdown import Grace, Shutdown
from headway.launcher.processes.starter import Starter, cannot_start

_REPLY_TIMEOUT_S = 1.0  # for a server that has imported torch to answer
_EXIT_S = 10.0  # Python normally exits within this time after a script
_EARLY_POLL_S = 0.01  # just after a stop, when idle ranks exit
_POLL_S = 0.25  # the interval of checks for hangs and failures of other machines


class RankProcesses:
    """The ranks of this machine in one attempt.

    `envs` maps each rank to its own environment variables. `reports_exit` is true for Python
    programs, which send an exit record. `remote_failure` returns the failure of another machine, or
    None if there is none.
    """

    def __init__(
        self,
        starter: Starter,
        envs: Mapping[int, dict[str, str]],
        output: Output,
        watch: Watch,
        attempt: int,
        reports_exit: bool,
        debug_rank: int | None,
        grace: Grace,
        remote_failure: Callable[[], Failed | None],
    ) -> None:
        self.envs = envs
        self._starter = starter
        self._output = output
        self._watch = watch
        self._attempt = attempt
        self._reports_exit = reports_exit
        self._debug_rank = debug_rank
        self._grace = grace
        self._remote_failure = remote_failure
        # on another machine, reported while the ranks here were saving before a stop
        self.failure_during_stop: Failed | None = None
        self.channels: dict[int, RankChannel] = {}  # by rank
        self.handles: dict[int, ProcessHandle] = {}  # by rank
        self._terminals: list[_Terminal] = []  # of rank 0
        self._stopped_at = float("inf")  # time of the stop request, since the epoch
        self._shutdown: Shutdown | None = None  # while the ranks are being stopped
        self._sent: dict[int, int] = {}  # by rank: the shutdown's last signal
        self._killed_after_s: dict[int, float] = {}  # by rank: after the stop request
        self.is_cut_short = False  # set by other threads and signal handlers
        self.statuses: list[RankStatus] = []  # of all ranks, when communication failed
        self._is_starting = False
        self._stop_during_start: SignalException | None = None
        self._asked_to_stop_at = float("inf")
        self.exits: dict[int, RankExit] = {}  # by rank

    def start(self) -> None:
        """Start the ranks; an exception of `defer_stop` is raised once they are registered."""
        self._is_starting = True
        try:
            self._output.begin(self._attempt, self.envs)
            for rank, env in self.envs.items():
                if self._stop_during_start is None:
                    self._start_rank(rank, env)
        finally:
            self._is_starting = False
            if self._stop_during_start is not None:
                raise self._stop_during_start

    def defer_stop(self, stop: SignalException) -> bool:
        """Raise `stop` once a starting rank is registered; return False if no rank is starting.

        Signal handlers call this method, because raising `stop` at once would miss a rank that the
        server has started, but that is not registered yet.
        """
        if self._is_starting and self._stop_during_start is None:
            self._stop_during_start, self._asked_to_stop_at = stop, time.monotonic()
        return self._is_starting

    def _raise_deferred(self) -> None:
        if self._stop_during_start and time.monotonic() > self._asked_to_stop_at + _REPLY_TIMEOUT_S:
            raise self._stop_during_start

    def _start_rank(self, rank: int, env: Mapping[str, str]) -> None:
        try:
            streams = _Streams(
                has_stdin=rank == (self._debug_rank or 0),
                is_debugged=rank == self._debug_rank,
                is_prefixed=env["WORLD_SIZE"] != "1",
            )
        except OSError as error:
            raise cannot_start(error) from None
        try:
            pid = self._starter.start(env, streams.theirs, self._raise_deferred)
        finally:
            for fd in streams.theirs:
                os.close(fd)
        self._terminals += streams.terminals
        self.handles[rank] = ProcessHandle(pid)
        self.channels[rank] = self._watch.add(rank, pid, streams.channel)
        self._output.add(rank, streams.pipes)

    def collect(self, timeout_s: float = 0) -> None:
        """Wait at most `timeout_s` for an exit, and record all ranks that have exited."""
        self._starter.resume_guardian()
        self._starter.exit_event.wait(timeout_s)
        for rank, channel in self.channels.items():
            ended = self._starter.exits.get(channel.pid)
            if rank not in self.exits and ended is not None:
                self.exits[rank] = self._exit_of(rank, ended)

    def _exit_of(self, rank: int, ended: ProcessExit) -> RankExit:
        is_killed = ended.code == -signal.SIGKILL
        end = RankExit(
            rank=rank,
            pid=ended.pid,
            code=ended.code,
            time=ended.time,
            was_stopping=ended.time > self._stopped_at,
            exited_silently=self._reports_exit,
            killed_after_s=self._killed_after_s.get(rank) if is_killed else None,
        )
        for record in self._watch.end(rank, ended.code):
            if isinstance(record, Crash):
                if is_communication_error(record):  # the rank did not print its traceback
                    self._output.append(rank, record.traceback)
                end = end._replace(crash=record)
            else:
                end = end._replace(message=record.message, feature_use=record.feature_use)
            end = end._replace(time=record.time, exited_silently=False)
            if record.code:
                end = end._replace(was_stopping=record.time > self._stopped_at)
                if record.time < self._stopped_at < ended.time:  # the rank was already exiting
                    end = end._replace(code=record.code)
        return end

    def poll(self) -> RunResult:
        """Return the state of the ranks; if all are running, wait for an exit for a short time."""
        self.collect(timeout_s=_POLL_S if self._alive() else 0)
        has_failed = any(end.is_failure for end in self.exits.values())
        if not has_failed and (overdue := self._find_overdue()):
            limit = f"{self._grace.usual_s:g} s (--grace-period-s)"
            log(f"{named(overdue)} failed, but did not exit within {limit}")
            has_failed = True
        if has_failed or self._watch.hang is not None:
            return RunResult(WorkerState.FAILED)
        if len(self.exits) == len(self.envs):
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self.exits))
        return RunResult(WorkerState.HEALTHY)

    def _find_overdue(self) -> list[int]:
        """Return failed ranks that outlived the grace period; none if a rank is being debugged."""
        is_alone = any(env["WORLD_SIZE"] == "1" for env in self.envs.values())
        if is_alone or self._debug_rank is not None:
            return []
        since = epoch_time() - self._grace.usual_s
        return [rank for rank in self._alive() if self.channels[rank].has_failed(since)]

    def close(self, number: signal.Signals = signal.SIGTERM, *, are_victims: bool = False) -> None:
        """Stop the running ranks and, unless all succeeded, any processes they left behind.

        `are_victims` means that the run failed on another machine.
        """
        self.collect()
        failed = [end for end in self.exits.values() if end.is_failure]
        is_failure = bool(failed or self._find_overdue()) or self._watch.hang is not None
        is_success = not is_failure and not self._alive()
        if self._shutdown is None:
            self._watch.begin_stop()
            if any(end.crash and is_communication_error(end.crash) for end in failed):
                self.statuses = self._watch.statuses()  # now, while other ranks are still running
            if self._alive():  # their output must not block a save
                self._output.set_timeout(FAILURE_UNREAD_TIMEOUT_S if failed else UNREAD_TIMEOUT_S)
            self._stopped_at, now = epoch_time(), time.monotonic()
            self._shutdown = Shutdown(
                number,
                now,
                self._grace.at(self._stopped_at),
                self._watch.will_save(),
                failed_at=now if is_failure or are_victims or self._has_left() else float("inf"),
            )
        self._stop(self._shutdown)
        for handle in self.handles.values():
            handle.close()
        while self._terminals:
            os.close(self._terminals.pop().fd)
        if not is_success:
            self._starter.terminate_leftovers()

    def _stop(self, shutdown: Shutdown) -> None:
        """Send the shutdown's signals until all ranks have exited or are abandoned."""
        self._starter.resume_server()
        announced_at = time.monotonic() + SILENT_S
        while alive := self._alive():
            now = time.monotonic()
            shutdown = shutdown._replace(is_cut_short=self.is_cut_short)
            may_save = shutdown.will_save and shutdown.failed_at > now
            if may_save and (self._has_failure() or self._has_left()):
                shutdown = shutdown._replace(failed_at=now)
            killable = alive if self._grace.kills_idle else []
            idle = [rank for rank in killable if self.channels[rank].may_be_killed]
            for rank, number in shutdown.signals(now, alive, self._sent, idle).items():
                if number == signal.SIGKILL and rank not in idle:
                    self._killed_after_s[rank] = now - shutdown.began_at
                self.handles[rank].send(number)
                if number != signal.SIGKILL:  # a suspended rank handles no other signal
                    self.handles[rank].send(signal.SIGCONT)
                self._sent[rank] = number
            is_early = now < shutdown.began_at + _POLL_S  # idle ranks exit at once
            self.collect(timeout_s=_EARLY_POLL_S if is_early else _POLL_S)
            if now >= announced_at and self._should_log_wait(now - announced_at):
                log(f"waiting for {self._describe_stop(shutdown)}")
                announced_at = float("inf")
            if shutdown.is_abandoned(now):
                self._abandon(self._alive())

    def _should_log_wait(self, waited_s: float) -> bool:
        """Return whether a rank is still running its script, or takes unusually long to exit."""
        alive = self._alive()
        limit_s = _EXIT_S if all(self.channels[rank].ends for rank in alive) else 0
        return bool(alive) and waited_s >= limit_s

    def _has_failure(self) -> bool:
        """Return whether a rank failed on this machine, or another machine reported a failure."""
        self.failure_during_stop = self.failure_during_stop or self._remote_failure()
        failed_here = any(end.is_failure for end in self.exits.values())
        return failed_here or self.failure_during_stop is not None

    def _has_left(self) -> bool:
        """Return whether a rank exited with 0 before its script ended; others cannot save then."""
        left = (self.channels[rank] for rank, end in self.exits.items() if end.code == 0)
        return self._watch.will_save() and not all(channel.ends for channel in left)

    def _abandon(self, ranks: list[int]) -> None:
        """Log the state of killed ranks that the kernel does not remove; treat them as exited."""
        for rank in ranks:
            pid = self.channels[rank].pid
            log(f"rank {rank} (process {pid}) has been killed, but is {read_state(pid)}")
            killed = ProcessExit(pid, -signal.SIGKILL, epoch_time(), leftovers=False)
            self.exits[rank] = self._exit_of(rank, killed)

    def _describe_stop(self, shutdown: Shutdown) -> str:
        grace_s = round(shutdown.ends_at - shutdown.began_at, 1)
        will_save = shutdown.will_save and shutdown.failed_at == float("inf")
        verb = "save and stop" if will_save else "stop"
        again = "; press Ctrl-C again to kill them now" if shutdown.number == signal.SIGINT else ""
        return f"{named(self._alive())} to {verb}, up to {grace_s:g} s{again}"

    @property
    def is_stopping(self) -> bool:
        return self._shutdown is not None

    def end_grace_period(self) -> None:
        """End the grace period; may be called from any thread and from signal handlers."""
        self.is_cut_short = True
        self._starter.exit_event.set()

    def forward(self, number: int) -> None:
        """Send a signal to the running ranks, but not to their child processes."""
        if number == signal.SIGWINCH:
            for terminal in self._terminals:
                terminal.resize()
        for rank in self._alive():
            self.handles[rank].send(number)

    def interrupt_debugged(self) -> bool:
        """Send SIGINT to the debugged rank; return False if it is not running."""
        if self._debug_rank not in self._alive():
            return False
        self.handles[self._debug_rank].send(signal.SIGINT)
        return True

    def _alive(self) -> list[int]:
        return [rank for rank in self.channels if rank not in self.exits]


class _Terminal(NamedTuple):
    """A rank's pseudo-terminal, narrower than the launcher's terminal by the prefix's width."""

    fd: int
    target: int  # 1 or 2: the launcher's terminal
    margin: int  # columns of the prefix

    def resize(self) -> None:
        import termios

        with suppress(termios.error, AttributeError):  # Python 3.10 lacks these functions
            rows, columns = termios.tcgetwinsize(self.target)
            termios.tcsetwinsize(self.fd, (rows, max(columns - self.margin, 0)))


class _Streams:
    """The descriptors of a new rank: four for the rank (`theirs`), and the launcher's ends.

    Rank 0 reads the launcher's stdin, and writes to a terminal if the launcher does. A debugged
    rank gets the launcher's own three streams; rank 0 is then treated like any other rank.
    """

    def __init__(self, has_stdin: bool, is_debugged: bool, is_prefixed: bool) -> None:
        self._margin = len("[0] ") if is_prefixed else 0
        self._opened: list[int] = []
        self.terminals: list[_Terminal] = []
        self.pipes: dict[int, int] = {}  # read ends; 1: stdout, 2: stderr
        try:
            (stdin,) = self._keep(os.dup(0) if has_stdin else os.open(os.devnull, os.O_RDONLY))
            if is_debugged:
                out, err = self._keep(os.dup(1), os.dup(2))
            else:
                self.pipes[1], out = self._channel(1, has_stdin and os.isatty(1))
                self.pipes[2], err = self._channel(2, has_stdin and os.isatty(2))
            ours, theirs = socket.socketpair()
            self.channel, channel = self._keep(ours.detach(), theirs.detach())
        except OSError:
            for fd in self._opened:
                os.close(fd)
            raise
        self.theirs = (stdin, out, err, channel)

    def _channel(self, target: int, is_terminal: bool) -> tuple[int, int]:
        """Return the read and write ends of a pipe or pseudo-terminal for a stream."""
        if not is_terminal:
            reading, writing = self._keep(*os.pipe())
            return reading, writing
        import pty
        import termios

        reading, writing = self._keep(*pty.openpty())
        modes = termios.tcgetattr(writing)
        modes[1] &= ~termios.OPOST  # the launcher's terminal already processes output
        termios.tcsetattr(writing, termios.TCSANOW, modes)
        (own,) = self._keep(os.dup(reading))  # `Output` closes the other one
        terminal = _Terminal(own, target, self._margin)
        terminal.resize()
        self.terminals.append(terminal)
        return reading, writing

    def _keep(self, *fds: int) -> tuple[int, ...]:
        self._opened += fds
        return fds
