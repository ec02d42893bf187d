"""The process context that torch's agent drives: the ranks of one machine in one attempt.

The agent is torch's; the processes, their pipes and their end are handled here, without torch's log
files, tailing threads and signal handlers.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.elastic.multiprocessing.api import (
    LogsDest,
    LogsSpecs,
    PContext,
    RunProcsResult,
    SignalException,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from headway.ipc.forking import ProcessHandle
from headway.ipc.records import Crash, ProcessExit
from headway.ipc.stderr import SILENT_S, log, named
from headway.launcher.diagnosis import hang
from headway.launcher.diagnosis.failures import RankExit
from headway.launcher.diagnosis.hang import RankStatus
from headway.launcher.diagnosis.reasons import is_communication_error
from headway.launcher.diagnosis.stacks import read_state
from headway.launcher.diagnosis.watch import Watch
from headway.launcher.output.pipes import FAILURE_UNREAD_TIMEOUT_S, UNREAD_TIMEOUT_S, Output
from headway.launcher.processes.shutdown import Grace, Shutdown
from headway.launcher.processes.starter import Starter, cannot_start

if TYPE_CHECKING:
    from headway.launcher.multinode.messages import Failed

_ANSWER_S = 1.0  # for a server that has imported torch to answer
_LEAVING_S = 10.0  # more than Python needs to exit after a script's end
_ANSWERS_EVERY_S = 0.01
_CHECK_EVERY_S = 0.25  # for other machines and for a hang, while no rank ends here


class RankProcesses(PContext):
    """All ranks of this machine, in one attempt.

    `envs` has, by local rank, the variables that differ from rank to rank, RANK among them. A
    program of Python `reports_its_end` by a record. `remote_failure` returns how the run has
    failed on another machine, as far as is known.
    """

    def __init__(
        self,
        starter: Starter,
        envs: Mapping[int, dict[str, str]],
        output: Output,
        watch: Watch,
        attempt: int,
        reports_its_end: bool,
        debug_rank: int | None,
        grace: Grace,
        remote_failure: Callable[[], Failed | None],
    ) -> None:
        super().__init__(
            name="headway",
            entrypoint="headway",
            args=dict.fromkeys(envs, ()),
            envs=dict(envs),
            logs_specs=NoLogs(),
        )
        self._starter = starter
        self._output = output
        self._watch = watch
        self._attempt = attempt
        self._reports_its_end = reports_its_end
        self._debug_rank = debug_rank
        self._grace = grace
        self._failed_elsewhere = remote_failure
        self.failure_during_stop: Failed | None = (
            None  # on another machine, while ranks were to save
        )
        self._ranks = {at: int(env["RANK"]) for at, env in envs.items()}  # by local rank
        self.local_ranks: dict[int, int] = {}  # by pid
        self.handles: dict[int, ProcessHandle] = {}  # by local rank
        self._terminals: list[_Terminal] = []  # of rank 0
        self._stopped_at = float("inf")  # when the ranks were asked to stop, since the epoch
        self._shutdown: Shutdown | None = None  # once they are being stopped
        self._sent: dict[int, int] = {}  # by local rank: the last signal of the shutdown
        self._killed_after_s: dict[int, float] = {}  # by local rank: since it was asked to stop
        self._is_cut_short = False  # set by another thread, or a signal's handler
        self.are_victims = False  # the run has failed on another machine
        self.statuses: list[RankStatus] = []  # of all ranks when communication failed
        self._is_starting = False
        self._stop_during_start: SignalException | None = None
        self._asked_to_stop_at = float("inf")
        self.exits: dict[int, RankExit] = {}  # by local rank, in the order in which they ended

    def pids(self) -> dict[int, int]:
        return {local_rank: pid for pid, local_rank in self.local_ranks.items()}

    def start(self) -> None:
        """Start the ranks; unlike torch's, this leaves the launcher's signal handlers alone."""
        self._is_starting = True
        try:
            self._output.begin(self._attempt, self._ranks.values())
            for local_rank, env in self.envs.items():
                if self._stop_during_start is None:
                    self._start_rank(local_rank, env)
        finally:
            self._is_starting = False
            if self._stop_during_start is not None:
                raise self._stop_during_start

    _start = start

    def defer(self, stop: SignalException) -> bool:
        """Raise `stop` only after the rank that is being started is known here; else False.

        Called by a signal's handler: without this, a rank that the server has started already would
        not be stopped with the others.
        """
        if self._is_starting and self._stop_during_start is None:
            self._stop_during_start, self._asked_to_stop_at = stop, time.monotonic()
        return self._is_starting

    def _raise_deferred(self) -> None:
        if self._stop_during_start and time.monotonic() > self._asked_to_stop_at + _ANSWER_S:
            raise self._stop_during_start

    def _start_rank(self, local_rank: int, env: dict[str, str]) -> None:
        rank = self._ranks[local_rank]
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
        self.handles[local_rank] = ProcessHandle(pid)
        self.local_ranks[pid] = local_rank
        self._output.add(rank, streams.pipes)
        self._watch.add(rank, pid, streams.channel)

    def collect(self, timeout_s: float = 0) -> None:
        """Record the ranks that have ended, after waiting at most `timeout_s` for the first."""
        self._starter.resume_guardian()
        self._starter.bell.wait(timeout_s)
        for pid, ended in self._starter.ends.copy().items():
            local_rank = self.local_ranks.get(pid)
            if local_rank is not None and local_rank not in self.exits:
                self.exits[local_rank] = self._end_of(local_rank, ended)

    def _end_of(self, local_rank: int, ended: ProcessExit) -> RankExit:
        rank, is_killed = self._ranks[local_rank], ended.code == -signal.SIGKILL
        end = RankExit(
            rank=rank,
            pid=ended.pid,
            code=ended.code,
            time=ended.time,
            was_stopping=ended.time > self._stopped_at,
            exited_silently=self._reports_its_end,
            killed_after_s=self._killed_after_s.get(local_rank) if is_killed else None,
        )
        for record in self._watch.end(rank, ended.code):
            if isinstance(record, Crash):
                if is_communication_error(record):  # the rank has not printed it
                    self._output.append(rank, record.traceback)
                end = end._replace(crash=record)
            else:
                end = end._replace(message=record.message, feature_use=record.feature_use)
            end = end._replace(time=record.time, exited_silently=False)
            if record.code:
                end = end._replace(was_stopping=record.time > self._stopped_at)
                if record.time < self._stopped_at < ended.time:  # stopped while it was ending
                    end = end._replace(code=record.code)
        return end

    def _poll(self) -> RunProcsResult | None:
        self.collect(timeout_s=_CHECK_EVERY_S if self._alive() else 0)
        failed = {at: end.code for at, end in self.exits.items() if end.is_failure}
        if not failed and (overdue := self._find_overdue()):
            ranks, limit = self._named(overdue), f"{self._grace.usual_s:g} s (--grace-period-s)"
            log(f"{ranks} failed, but did not exit within {limit}")
            failed = dict.fromkeys(overdue, 1)
        if self._watch.hang is not None:  # torch expects a process that failed
            failed = dict.fromkeys(self.envs, hang.EXIT_CODE)
        if failed:
            pids, file = self.pids(), ""
            return RunProcsResult(
                failures={
                    at: ProcessFailure(at, pids[at], code, file) for at, code in failed.items()
                }
            )
        if len(self.exits) == self.nprocs:
            return RunProcsResult(return_values=dict.fromkeys(self.exits))
        return None

    def _find_overdue(self) -> list[int]:
        """Return the failed ranks, not debugged, that have outlived the grace period."""
        if self.envs[0]["WORLD_SIZE"] == "1" or self._debug_rank is not None:
            return []
        since = time.time() - self._grace.usual_s
        return [at for at in self._alive() if self._watch.has_failed(self._ranks[at], since)]

    def _close(self, death_sig: signal.Signals, timeout: int | None = None) -> None:
        """Stop the running ranks, and unless all have succeeded, what they have left running."""
        self.collect()
        failed = [end for end in self.exits.values() if end.is_failure]
        is_failure = bool(failed or self._find_overdue()) or self._watch.hang is not None
        is_success = not is_failure and not self._alive()
        if self._shutdown is None:
            self._watch.begin_stop()
            if any(end.crash and is_communication_error(end.crash) for end in failed):
                self.statuses = self._watch.statuses()  # now, while the others still run
            if self._alive():  # printing while they save must not block them
                self._output.set_timeout(FAILURE_UNREAD_TIMEOUT_S if failed else UNREAD_TIMEOUT_S)
            self._stopped_at, now = time.time(), time.monotonic()
            self._shutdown = Shutdown(
                death_sig,
                now,
                self._grace.usual_s,
                self._grace.victim_s,
                self._grace.saving_s(self._stopped_at),
                self._watch.will_save(),
                failed_at=now if is_failure or self.are_victims else float("inf"),
            )
        self._stop(self._shutdown)
        for handle in self.handles.values():
            handle.close()
        while self._terminals:
            os.close(self._terminals.pop().fd)
        if not is_success:
            self._starter.end_leftovers()

    def _stop(self, shutdown: Shutdown) -> None:
        """Send the signals of a shutdown until no rank runs, or those that do are given up."""
        self._starter.resume_server()
        announced_at = time.monotonic() + SILENT_S
        while alive := self._alive():
            now = time.monotonic()
            shutdown = shutdown._replace(is_cut_short=self._is_cut_short)
            if shutdown.failed_at > now and shutdown.will_save and self._has_failure():
                shutdown = shutdown._replace(failed_at=now)
            idle = [at for at in alive if self._grace.kills_idle and self._is_idle(at)]
            for local_rank, number in shutdown.signals(now, alive, self._sent, idle).items():
                if number == signal.SIGKILL and local_rank not in idle:
                    self._killed_after_s[local_rank] = now - shutdown.began_at
                self.handles[local_rank].send(number)
                self._sent[local_rank] = number
            is_early = now < shutdown.began_at + _CHECK_EVERY_S  # idle ranks answer at once
            self.collect(timeout_s=_ANSWERS_EVERY_S if is_early else _CHECK_EVERY_S)
            if now >= announced_at and self._is_awaited(now - announced_at):
                log(f"waiting for {self._describe_stop(shutdown)}")
                announced_at = float("inf")
            if shutdown.is_abandoned(now):
                self._give_up(self._alive())

    def _is_idle(self, local_rank: int) -> bool:
        return self._watch.may_be_killed(self._ranks[local_rank])

    def _is_awaited(self, waited_s: float) -> bool:
        """Return whether a rank still runs its script, or takes too long to exit after it."""
        alive = [self._ranks[at] for at in self._alive()]
        limit_s = _LEAVING_S if all(map(self._watch.has_ended, alive)) else 0
        return bool(alive) and waited_s >= limit_s

    def _has_failure(self) -> bool:
        """Return whether a rank has failed, on this machine or, as far as is known, another."""
        self.failure_during_stop = self.failure_during_stop or self._failed_elsewhere()
        failed_here = any(end.is_failure for end in self.exits.values())
        return failed_here or self.failure_during_stop is not None

    def _give_up(self, local_ranks: list[int]) -> None:
        """Treat killed ranks that the kernel does not remove as ended, and print their state."""
        for local_rank in local_ranks:
            pid, rank = self.pids()[local_rank], self._ranks[local_rank]
            log(f"rank {rank} (process {pid}) has been killed, but is {read_state(pid)}")
            killed = ProcessExit(pid, -signal.SIGKILL, time.time(), leftovers=False)
            self.exits[local_rank] = self._end_of(local_rank, killed)

    def _describe_stop(self, shutdown: Shutdown) -> str:
        grace_s = round(shutdown.ends_at - shutdown.began_at, 1)
        will_save = shutdown.will_save and shutdown.failed_at == float("inf")
        verb = "save and stop" if will_save else "stop"
        again = "; Ctrl-C again ends them now" if shutdown.number == signal.SIGINT else ""
        return f"{self._named(self._alive())} to {verb}, up to {grace_s:g} s{again}"

    @property
    def is_stopping(self) -> bool:
        return self._shutdown is not None

    def end_grace_period(self) -> None:
        """End the grace period; any thread may call it, and a signal's handler."""
        self._is_cut_short = True
        self._starter.bell.ring()

    def forward(self, number: int) -> None:
        """Send a signal to the running ranks, but not to their child processes."""
        if number == signal.SIGWINCH:
            for terminal in self._terminals:
                terminal.fit()
        for local_rank in self._alive():
            self.handles[local_rank].send(number)

    def interrupt_debugged(self) -> bool:
        """Send Ctrl-C to the debugged rank; False if it is not running."""
        for local_rank in self._alive():
            if self._ranks[local_rank] == self._debug_rank:
                self.handles[local_rank].send(signal.SIGINT)
                return True
        return False

    def _alive(self) -> list[int]:
        return [at for at in self.local_ranks.values() if at not in self.exits]

    def _named(self, local_ranks: list[int]) -> str:
        return named([self._ranks[at] for at in local_ranks])


class _Terminal(NamedTuple):
    """A pseudo-terminal of a rank, which is as large as the launcher's, less the prefix."""

    fd: int
    target: int  # 1 or 2: the launcher's terminal
    margin: int  # the columns of the prefix

    def fit(self) -> None:
        import termios

        with suppress(termios.error, AttributeError):  # Python 3.10 has no such functions
            rows, columns = termios.tcgetwinsize(self.target)
            termios.tcsetwinsize(self.fd, (rows, max(columns - self.margin, 0)))


class _Streams:
    """The descriptors of a new rank: `theirs`, four that it gets, and those the launcher reads.

    Rank 0 reads the launcher's stdin, and writes to a terminal where the launcher does. A rank that
    is debugged has the launcher's own three streams instead, and rank 0 is then like any other.
    """

    def __init__(self, has_stdin: bool, is_debugged: bool, is_prefixed: bool) -> None:
        self._margin = len("[0] ") if is_prefixed else 0
        self._opened: list[int] = []
        self.terminals: list[_Terminal] = []
        self.pipes: dict[int, int] = {}  # 1 for stdout, 2 for stderr: the reading end
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
        """Return the reading and the writing end of a pipe or a pseudo-terminal for a stream."""
        if not is_terminal:
            reading, writing = self._keep(*os.pipe())
            return reading, writing
        import pty
        import termios

        reading, writing = self._keep(*pty.openpty())
        modes = termios.tcgetattr(writing)
        modes[1] &= ~termios.OPOST  # the launcher's own terminal does this
        termios.tcsetattr(writing, termios.TCSANOW, modes)
        (own,) = self._keep(os.dup(reading))  # the other is closed by who reads it
        terminal = _Terminal(own, target, self._margin)
        terminal.fit()
        self.terminals.append(terminal)
        return reading, writing

    def _keep(self, *fds: int) -> tuple[int, ...]:
        self._opened += fds
        return fds


class NoLogs(LogsSpecs):
    """Log settings for torch: no files to write, redirect or tail."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return ""
