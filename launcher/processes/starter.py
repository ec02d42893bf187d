"""The launcher's side of `server.py`: requests ranks, and reads which have ended.

Imports no torch, so that the server can be started before the launcher's own slow imports.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headway.errors import MORE_PROCESSES, LaunchError
from headway.ipc.forking import ProcessHandle, adopt_orphans
from headway.ipc.records import ProcessExit, ProcessStart, ServerReady, StartFailed, decode_record
from headway.ipc.signals import Bell
from headway.ipc.stderr import log, waiting_for
from headway.launcher.plan.plan import LaunchPlan
from headway.launcher.processes.shutdown import end_descendants, end_processes, is_running
from headway.launcher.rank import worker

if TYPE_CHECKING:
    from psutil import Process

_CHECK_EVERY_S = 0.1  # a signal just before a wait does not end it
_TITLE_ROOM = "-" * 60  # an argument that the process titles of ranks overwrite
_SAY_AFTER_S = 1.0  # what ends with its rank is gone by then
_MAX_NAMES = 8


class ServerEnded(Exception):
    """The fork server has ended, and cannot start a rank."""


class Starter:
    """Starts ranks, keeps how they ended in `ends`, and rings `bell` for a thread that waits.

    `environ` has the variables that all ranks share; they are set before the server imports torch.
    """

    def __init__(
        self, plan: LaunchPlan, environ: Mapping[str, str], *, is_quiet: bool = False
    ) -> None:
        self.is_quiet = is_quiet
        self.ends: dict[int, ProcessExit] = {}  # by pid
        self.bell = Bell()
        self.server_code: int | None = None  # of a server that ended on its own; negative: signal
        self._plan = plan
        self._environ = environ
        adopt_orphans()
        self._start_server()

    def _start_server(self) -> None:
        self._answers: deque[int | LaunchError | None] = deque()  # to what was requested
        self._has_answered = Bell()
        self._server_pid = 0
        self._server: ProcessHandle | None = None
        self._left_processes = False
        self._is_closing = False
        self._socket, theirs = socket.socketpair()
        # until the new process has handlers
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, worker.USER_SIGNALS)
        try:
            self._guardian = subprocess.Popen(  # which forks the server
                self._command(theirs.fileno()),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=1,  # passed on also where it is the null device instead of a closed stream
                stderr=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C reaches the launcher alone
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
            self._socket.close()  # which ends the server
            self._guardian.wait()
            raise cannot_start(OSError(errno.EAGAIN, str(error))) from None

    def _command(self, fd: int) -> list[str]:
        program, settings = self._plan.program, self._plan.settings
        return [
            *self._plan.python,
            "-c",
            worker.bootstrap_code("processes.server"),
            str(fd),
            "program" if program.kind == "program" else settings.start_method,
            str(settings.grace_period_s),
            _TITLE_ROOM,
            program.kind,
            program.name,
            *program.args,
        ]

    def start(self, env: Mapping[str, str], fds: tuple[int, ...], check: Callable[[], None]) -> int:
        """Start one rank and return its pid.

        `env` has the variables that differ from rank to rank; `fds` are its stdin, stdout, stderr
        and status channel, which the caller closes. `check` is called while the server does not
        answer, and may raise. Raises LaunchError where the system refuses, and ServerEnded.
        """
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
        pid: int | LaunchError | None = None
        with suppress(OSError):
            self._socket.sendmsg([json.dumps(dict(env)).encode()], [rights])
            with waiting_for("the process that starts the ranks", is_quiet=self.is_quiet):
                pid = self._next_start(check)
        if isinstance(pid, LaunchError):
            raise pid
        if pid is None:
            self._reader.join()  # which sets `server_code`
            raise ServerEnded
        return pid

    def _next_start(self, check: Callable[[], None]) -> int | LaunchError | None:
        while not self._answers:
            if not self._has_answered.wait(_CHECK_EVERY_S):
                check()
        return self._answers.popleft()

    def restart_server(self) -> None:
        """Start another server if the last one has ended on its own."""
        if self.server_code is not None:
            self.close()
            self.server_code = None
            self._start_server()

    def leftovers(self) -> list[Process]:
        """Return what ranks have started and left running; empty while a rank runs."""
        if not self._left_processes:
            return []
        import psutil

        try:
            below = psutil.Process(self._server_pid).children(recursive=True)
        except (psutil.Error, OSError):  # it has ended, or /proc cannot be read
            return []  # its guardian or itself ends what is left
        return [process for process in below if is_running(process)]

    def end_leftovers(self) -> None:
        if self._left_processes:
            end_processes(lambda: self.leftovers() or None, 0)

    def resume_guardian(self) -> None:
        """Resume a suspended guardian, which must kill what a killed server leaves running."""
        self._guardian.send_signal(signal.SIGCONT)

    def resume_server(self) -> None:
        """Resume a suspended server; it could neither report nor end anything."""
        self.resume_guardian()
        if self._server is not None:
            self._server.send(signal.SIGCONT)

    def close(self) -> None:
        """Have the server end the remaining processes of the ranks; wait for it."""
        self._is_closing = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self.resume_server()
        self._guardian.terminate()  # ends one that has started no server yet
        if self._guardian.wait() != 0:
            end_descendants(0)  # which this process has adopted
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
                    self.ends.pop(record.pid, None)  # the system reuses process ids
                    self._answer(record.pid)
                elif isinstance(record, StartFailed):
                    error = OSError(record.errno, os.strerror(record.errno))
                    self._answer(cannot_start(error))
                elif isinstance(record, ProcessExit):
                    alive.discard(record.pid)
                    self._left_processes = record.leftovers
                    self._note(record)
        if not self._is_closing:
            code = self._guardian.wait()
            self.server_code = code if code <= 128 else 128 - code  # as a shell gives it
        self._answer(None)
        for pid in alive:  # the server died, and all ranks with it
            self._note(ProcessExit(pid, -signal.SIGKILL, time.time(), leftovers=False))

    def _answer(self, answer: int | LaunchError | None) -> None:
        self._answers.append(answer)
        self._has_answered.ring()

    def _note(self, end: ProcessExit) -> None:
        self.ends[end.pid] = end
        self.bell.ring()


def wait_for_leftovers(starter: Starter, grace_s: float) -> None:
    """Return once they have all ended, or after `grace_s` seconds; print once which they are."""
    began = time.monotonic()
    notice = ""
    while left := starter.leftovers():
        import psutil

        waited_s = time.monotonic() - began
        if waited_s >= grace_s:
            log(f"{grace_s:.0f} s are over: ending {_names(left)}")
            return
        if waited_s >= _SAY_AFTER_S and not notice:
            notice = f"waiting up to {grace_s:.0f} s for what the ranks left: {_names(left)}"
            log(notice)
        next_s = grace_s if notice else min(_SAY_AFTER_S, grace_s)
        psutil.wait_procs(left, timeout=next_s - waited_s)


def _names(left: Sequence[Process]) -> str:
    import psutil

    names = []
    for process in left[:_MAX_NAMES]:
        with suppress(psutil.Error):  # it has ended
            names.append(f"{process.name()} (pid {process.pid})")
    return ", ".join(names) + ", ..." * (len(left) > _MAX_NAMES)


def require_folder() -> None:
    """Raise LaunchError in a working directory that has been deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            "the working directory has been deleted",
            where="the shell of this launch",
            fix="`cd` to a folder that exists",
        ) from None


def cannot_start(error: OSError) -> LaunchError:
    fixes = {
        errno.E2BIG: "shorten the arguments or the environment",
        errno.EMFILE: "raise the limit of open files: `ulimit -n 4096`",
        errno.ENFILE: "close other programs: the system-wide limit on open files is reached",
        errno.EAGAIN: MORE_PROCESSES,
        errno.ENOMEM: "start fewer ranks, or free some memory",
    }
    return LaunchError(
        f"the ranks cannot be started: {error.strerror}"
        + (f": {error.filename}" if error.filename else ""),
        where="the operating system",
        fix=fixes.get(error.errno or 0, "reinstall Headway in a working Python"),
    )
