"""The process context that torch's agent drives: starts one fresh interpreter for each rank.

A subclass of torch's public `PContext`, so that the agent stays torch's while the processes, their
pipes and their end are ours. torch's log files, tailing threads and signal handlers are not used.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing.api import (
    LogsDest,
    LogsSpecs,
    PContext,
    RunProcsResult,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from headway.launcher.output import Output

STOPPED_AND_SAVED = 75
"""A rank's exit code for: stopped by request, state saved, run me again. No failure."""

_VICTIM_GRACE_S = 5  # for ranks that stop because another one failed


class RankExit(NamedTuple):
    """How one rank ended; `code` is negative for a signal, as `subprocess` gives it."""

    rank: int
    pid: int
    code: int
    was_stopping: bool  # it ended after the launcher had begun to stop the ranks

    @property
    def is_failure(self) -> bool:
        return self.code not in (0, STOPPED_AND_SAVED)


class RankProcesses(PContext):
    """All ranks of this machine, in one attempt.

    Args:
        command: the argv of every rank.
        envs: by local rank, the whole environment of that rank; RANK is in it.
        output: reads the ranks' pipes.
        attempt: 0, and one more for each restart.
    """

    def __init__(
        self,
        command: Sequence[str],
        envs: Mapping[int, dict[str, str]],
        output: Output,
        attempt: int,
    ) -> None:
        super().__init__(
            name="headway",
            entrypoint=command[0],
            args={local_rank: tuple(command[1:]) for local_rank in envs},
            envs=dict(envs),
            logs_specs=NoLogs(),
        )
        self._command = list(command)
        self._output = output
        self._attempt = attempt
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._stopping = False
        self._kill_at = float("inf")  # when grace ends, on the monotonic clock
        self.exits: dict[int, RankExit] = {}  # by local rank, in the order in which they ended

    def start(self) -> None:
        """Start the ranks; unlike torch's, this leaves the launcher's signal handlers alone."""
        self._start()

    def pids(self) -> dict[int, int]:
        return {local_rank: process.pid for local_rank, process in self._processes.items()}

    def _start(self) -> None:
        for local_rank, env in self.envs.items():
            reads, writes = zip(*(os.pipe() for _ in range(2)), strict=True)
            try:
                process = subprocess.Popen(
                    self._command,
                    env=env,
                    stdin=None if env["RANK"] == "0" else subprocess.DEVNULL,
                    stdout=writes[0],
                    stderr=writes[1],
                    start_new_session=True,  # the terminal's Ctrl-C reaches the launcher alone
                )
            finally:
                for fd in writes:
                    os.close(fd)
            self._processes[local_rank] = process
            self._output.add(int(env["RANK"]), self._attempt, {1: reads[0], 2: reads[1]})
            threading.Thread(target=self._await, args=(local_rank, process), daemon=True).start()

    def _await(self, local_rank: int, process: subprocess.Popen[bytes]) -> None:
        self._ended.put((local_rank, process.wait()))

    def _collect(self, timeout_s: float = 0) -> None:
        """Note the ranks that have ended, after waiting at most `timeout_s` for the first."""
        try:
            while True:
                ended = self._ended.get(timeout_s > 0, timeout_s or None)
                timeout_s = 0
                if ended is None:
                    continue
                local_rank, code = ended
                rank, pid = int(self.envs[local_rank]["RANK"]), self._processes[local_rank].pid
                self.exits[local_rank] = RankExit(rank, pid, code, self._stopping)
        except queue.Empty:
            pass

    def _poll(self) -> RunProcsResult | None:
        self._collect()
        failures = {
            local_rank: ProcessFailure(local_rank, end.pid, end.code, error_file="")
            for local_rank, end in self.exits.items()
            if end.is_failure
        }
        if failures:
            return RunProcsResult(failures=failures)
        if len(self.exits) == self.nprocs:
            return RunProcsResult(return_values=dict.fromkeys(self.exits))
        return None

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Ask the living ranks to stop, wait, then end whatever is left in their sessions."""
        self._collect()
        if any(end.is_failure for end in self.exits.values()):
            timeout = min(timeout, _VICTIM_GRACE_S)
        if not self._stopping:
            self._stopping = True
            for local_rank in self._alive():
                with suppress(ProcessLookupError):
                    os.kill(self._processes[local_rank].pid, death_sig)
        self._kill_at = min(self._kill_at, time.monotonic() + timeout)
        while self._alive() and (left_s := self._kill_at - time.monotonic()) > 0:
            self._collect(timeout_s=left_s)
        for process in self._processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        while self._alive():
            self._collect(timeout_s=1)

    def hurry(self) -> None:
        """Grant no more grace; may be called from a signal handler while `close` waits."""
        self._kill_at = 0
        self._ended.put(None)

    def _alive(self) -> list[int]:
        return [local_rank for local_rank in self._processes if local_rank not in self.exits]


class NoLogs(LogsSpecs):
    """Tells torch that there are no files to write, redirect or tail."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return ""
