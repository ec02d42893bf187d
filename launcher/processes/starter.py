"""The launcher's client for `server.py`: requests ranks, and receives their exits.

This module does not import torch, so the server can start before the launcher's slow imports.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from resource import RLIMIT_AS, RLIMIT_NOFILE, RLIMIT_NPROC
from typing import TYPE_CHECKING, Any

from headway.errors import MORE_PROCESSES, Code, LaunchError
from headway.ipc.forking import ProcessHandle, adopt_orphans
from headway.ipc.records import ProcessExit, ProcessStart, ServerReady, StartFailed, decode_record
from headway.ipc.run_contract import epoch_time
from headway.ipc.signals import SignalSafeEvent
from headway.ipc.stderr import log, waiting_for
from headway.launcher.plan.plan import LaunchPlan
from headway.launcher.processes.shutdown import is_running, terminate, terminate_descendants
from headway.launcher.rank import worker

if TYPE_CHECKING:
    from psutil import Process

_POLL_S = 0.1  # a signal just before a wait does not interrupt it
_TITLE_SPACE = "-" * 60  # overwritten by the ranks' process titles
_NOTICE_AFTER_S = 1.0  # most child processes of ranks have exited by then
_MAX_NAMES = 8
_NUM_FILES, _FILES_PER_RANK = 32, 8  # the launcher opens 25, and 7 per rank
_FIXES: dict[int, tuple[Any, ...]] = {  # and the limit, the shell's flag for it, and its unit
    errno.E2BIG: ("shorten the arguments or the environment",),
    errno.EMFILE: ("raise the limit on open files: `ulimit -n 4096`", RLIMIT_NOFILE, "-n", 1),
    errno.ENFILE: ("close other programs: the system-wide limit on open files has been reached",),
    errno.EAGAIN: (MORE_PROCESSES, RLIMIT_NPROC, "-u", 1),
    errno.ENOMEM: ("raise `ulimit -v`, start fewer ranks, or free memory", RLIMIT_AS, "-v", 1024),
}


class ServerExited(Exception):
    """The fork server has exited and cannot start a rank."""


class Starter:
    """Starts ranks, stores their exits in `exits`, and sets `exit_event` after each exit.

    `environ` is common to all ranks; it is already set when the server imports torch.
    """

    def __init__(
        self, plan: LaunchPlan, environ: Mapping[str, str], *, is_quiet: bool = False
    ) -> None:
        self.is_quiet = is_quiet
        self.exits: dict[int, ProcessExit] = {}  # by pid
        self.exit_event = SignalSafeEvent()
        self.server_exit_code: int | None = None  # None: running or closed; negative: by a signal
        self._plan = plan
        self._environ = environ
        adopt_orphans()
        self._start_server()

    def _start_server(self) -> None:
        self._replies: deque[int | LaunchError | None] = deque()  # to start requests
        self._reply_event = SignalSafeEvent()
        self._server_pid = 0
        self._server: ProcessHandle | None = None
        self._left_processes = False
        self._is_closing = False
        self._socket, theirs = socket.socketpair()
        # signals stay blocked until the new process has handlers
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, worker.USER_SIGNALS)
        try:
            self._guardian = subprocess.Popen(  # the guardian forks the server
                self._command(theirs.fileno()),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=1,  # the null device if the stream is closed
                stderr=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C reaches only the launcher
            )
        except OSError as error:
            self._socket.close()
            raise cannot_start(error) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
        self._reader = threading.Thread(target=self._read, name="headway-starter", daemon=True)
        try:
            self._reader.start()
        except RuntimeError as error:  # too many threads
            self._socket.close()  # terminates the server
            self._guardian.wait()
            raise cannot_start(OSError(errno.EAGAIN, str(error))) from None

    def _command(self, fd: int) -> list[str]:
        program, settings = self._plan.program, self._plan.settings
        return [
            *self._plan.python,
            "-c",
            worker.bootstrap_code("processes.server"),
            str(fd),
            settings.start_method if program.is_python else "program",
            str(settings.grace_period_s),
            _TITLE_SPACE,
            program.kind,
            program.name,
            *program.args,
        ]

    def start(self, env: Mapping[str, str], fds: tuple[int, ...], check: Callable[[], None]) -> int:
        """Start one rank and return its pid.

        `env` contains the rank's own variables. `fds` are the rank's stdin, stdout, stderr and
        status channel; the caller closes them. `check` is called while this method waits for the
        server, and may raise. Raises LaunchError if the system refuses to start a process, and
        ServerExited if the server has exited.
        """
        pid: int | LaunchError | None = None
        with suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(dict(env)).encode()], fds)
            with waiting_for("the launcher's fork server", is_quiet=self.is_quiet):
                pid = self._next_reply(check)
        if isinstance(pid, LaunchError):
            raise pid
        if pid is None:
            self._reader.join()  # sets `server_exit_code`
            raise ServerExited
        return pid

    def _next_reply(self, check: Callable[[], None]) -> int | LaunchError | None:
        while not self._replies:
            if not self._reply_event.wait(_POLL_S):
                self.resume_server()  # a suspended server does not reply
                check()
        return self._replies.popleft()

    def restart_server(self) -> None:
        """Start a new server if the last one exited by itself."""
        if self.server_exit_code is not None:
            self.close()
            self.server_exit_code = None
            self._start_server()

    def leftovers(self) -> list[Process]:
        """Return the processes that exited ranks left running; empty while a rank is running."""
        if not self._left_processes:
            return []
        import psutil

        try:
            below = psutil.Process(self._server_pid).children(recursive=True)
        except (psutil.Error, OSError):  # the server has exited, or /proc is unreadable
            return []  # the guardian or the server terminates them
        return [process for process in below if is_running(process)]

    def terminate_leftovers(self) -> None:
        if self._left_processes:
            terminate(lambda: self.leftovers() or None, 0)

    def resume_guardian(self) -> None:
        """Resume a suspended guardian, so that it can kill the processes of a killed server."""
        self._guardian.send_signal(signal.SIGCONT)

    def resume_server(self) -> None:
        """Resume a suspended server, so that it can report and terminate processes."""
        self.resume_guardian()
        if self._server is not None:
            self._server.send(signal.SIGCONT)

    def close(self) -> None:
        """Make the server terminate the ranks' remaining processes and exit; wait for the exit."""
        self._is_closing = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self.resume_server()
        self._guardian.terminate()  # if it has not started a server yet
        if (code := self._guardian.wait()) != 0:
            if code == -signal.SIGKILL:
                log("note: the guardian of the fork server was killed by SIGKILL during the run")
            terminate_descendants(0)  # adopted by this process
        self._reader.join()
        self._socket.close()
        if self._server is not None:
            self._server.close()

    def _read(self) -> None:
        alive: set[int] = set()
        with suppress(OSError), self._socket.makefile("rb") as answers:
            for line in answers:
                record = decode_record(line)
                if isinstance(record, ServerReady):
                    self._server_pid = record.pid
                    self._server = ProcessHandle(record.pid)
                elif isinstance(record, ProcessStart):
                    alive.add(record.pid)
                    self._left_processes = False
                    self.exits.pop(record.pid, None)  # the system reuses process ids
                    self._add_reply(record.pid)
                elif isinstance(record, StartFailed):
                    error = OSError(record.errno, os.strerror(record.errno))
                    self._add_reply(cannot_start(error))
                elif isinstance(record, ProcessExit):
                    alive.discard(record.pid)
                    self._left_processes = record.leftovers
                    self._add_exit(record)
        if not self._is_closing:
            code = self._guardian.wait()
            self.server_exit_code = code if code <= 128 else 128 - code  # 128 + signal
        self._add_reply(None)
        for pid in alive:  # the server died, and all ranks with it
            self._add_exit(ProcessExit(pid, -signal.SIGKILL, epoch_time(), leftovers=False))

    def _add_reply(self, answer: int | LaunchError | None) -> None:
        self._replies.append(answer)
        self._reply_event.set()

    def _add_exit(self, end: ProcessExit) -> None:
        self.exits[end.pid] = end
        self.exit_event.set()


def wait_for_leftovers(starter: Starter, grace_s: float) -> None:
    """Wait up to `grace_s` seconds for processes that ranks left running; log their names once."""
    began = time.monotonic()
    notice = ""
    while left := starter.leftovers():
        import psutil

        waited_s = time.monotonic() - began
        if waited_s >= grace_s:
            log(f"terminating remaining processes after {grace_s:.0f} s: {_describe(left)}")
            return
        if waited_s >= _NOTICE_AFTER_S and not notice:
            notice = f"waiting up to {grace_s:.0f} s for remaining processes: {_describe(left)}"
            log(notice)
        next_s = grace_s if notice else min(_NOTICE_AFTER_S, grace_s)
        psutil.wait_procs(left, timeout=next_s - waited_s)


def _describe(left: Sequence[Process]) -> str:
    import psutil

    names = []
    for process in left[:_MAX_NAMES]:
        with suppress(psutil.Error):  # it has exited
            names.append(f"{process.name()} (pid {process.pid})")
    return ", ".join(names) + ", ..." * (len(left) > _MAX_NAMES)


def require_resources(num_ranks: int) -> None:
    """Raise LaunchError if the working directory is deleted, or too few files can be opened.

    Otherwise, torch's store would abort this process, or hang.
    """
    limit, _ = resource.getrlimit(RLIMIT_NOFILE)
    if -1 < limit < _NUM_FILES + _FILES_PER_RANK * num_ranks:
        raise cannot_start(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    try:
        os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            "the working directory has been deleted",
            where="the shell of this launch",
            fix="`cd` to a folder that exists",
            code=Code.CANNOT_START,
        ) from None


def cannot_start(error: OSError) -> LaunchError:
    where, default = "the operating system", ("reinstall Headway in a working Python",)
    fix, *limits = _FIXES.get(error.errno or 0, default)
    if limits:
        limit, flag, unit = limits
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            where += f"; `ulimit {flag}` is {most // unit}"
    return LaunchError(
        f"the ranks cannot be started: {error.strerror}"
        + (f": {error.filename}" if error.filename else ""),
        where=where,
        fix=fix,
        code=Code.CANNOT_START,
    )
