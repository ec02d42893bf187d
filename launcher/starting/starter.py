"""The launcher's side of `server.py`: requests ranks, and reads which have ended.

Imports no torch, so that the server can be started before the launcher's own slow imports.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress

from headway.contract.records import Ended, NotStarted, Started, decode_record
from headway.errors import LaunchError
from headway.launcher.inside.process_cleanup import adopts_orphans, end_descendants
from headway.launcher.inside.worker import bootstrap_code
from headway.launcher.planning.plan import LaunchPlan
from headway.launcher.reporting.waiting import waiting_for

_TITLE_ROOM = "-" * 60  # an argument that the process titles of ranks overwrite


class Starter:
    """Starts ranks, keeps how they ended in `ends`, and wakes a thread that waits for `woken`.

    The queue does not hold the ends: an exception from a signal handler could lose one that was
    just removed from it.

    Args:
        plan: how the ranks start.
        environ: variables that all ranks share; set before the server imports torch.
        is_quiet: do not say that the server is waited for.
    """

    def __init__(
        self, plan: LaunchPlan, environ: Mapping[str, str], *, is_quiet: bool = False
    ) -> None:
        self._is_quiet = is_quiet
        self.ends: dict[int, Ended] = {}  # by pid
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[int | OSError | None] = queue.SimpleQueue()
        self._socket, theirs = socket.socketpair()
        adopts_orphans()
        program, settings = plan.program, plan.settings
        arguments = [
            str(theirs.fileno()),
            "program" if program.kind == "program" else settings.start_method,
            str(settings.grace_period_s),
            _TITLE_ROOM,
            program.kind,
            program.name,
            *program.args,
        ]
        try:
            self._guardian = subprocess.Popen(
                [
                    *unbuffered(plan.python, environ),
                    "-c",
                    bootstrap_code("starting.server"),
                    *arguments,
                ],
                env=environ,
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
            theirs.close()
        self._reader = threading.Thread(target=self._read, name="headway-starter", daemon=True)
        self._reader.start()

    def start(self, env: Mapping[str, str], fds: tuple[int, ...]) -> int:
        """Start one rank and return its pid.

        Args:
            env: the variables that differ from rank to rank.
            fds: the rank's stdin, stdout, stderr, status channel and pipe of stacks; the caller
                closes them.

        Raises:
            LaunchError: the system refuses to start it, or the server has ended.
        """
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
        pid: int | OSError | None = None
        with suppress(OSError):
            self._socket.sendmsg([json.dumps(dict(env)).encode()], [rights])
            with waiting_for("the process that starts the ranks", is_quiet=self._is_quiet):
                pid = self._started.get()
        if isinstance(pid, OSError):
            raise cannot_start(pid)
        if pid is None:
            raise LaunchError(
                "the process that starts the ranks has ended",
                where=f"process {self._guardian.pid}, exit code {self._guardian.wait()}",
                fix="see its output above, or try --start-method exec",
            )
        return pid

    def close(self) -> None:
        """Tell the server to end the remaining processes of the ranks, and wait for it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._reader.join()  # until the server and its guardian have ended
        if self._guardian.wait() != 0:  # this process adopted what they left
            end_descendants(0)
        self._socket.close()

    def _read(self) -> None:
        alive: set[int] = set()
        with suppress(OSError), self._socket.makefile("rb") as answers:
            for line in answers:
                record = decode_record(line)
                if isinstance(record, Started):
                    alive.add(record.pid)
                    self.ends.pop(record.pid, None)  # the system reuses process ids
                    self._started.put(record.pid)
                elif isinstance(record, NotStarted):
                    self._started.put(OSError(record.errno, os.strerror(record.errno)))
                elif isinstance(record, Ended):
                    alive.discard(record.pid)
                    self._note(record)
        self._started.put(None)
        for pid in alive:  # the server died, and all ranks with it
            self._note(Ended(pid, -signal.SIGKILL, time.time()))

    def _note(self, end: Ended) -> None:
        self.ends[end.pid] = end
        self.woken.put(None)


def unbuffered(python: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Replace PYTHONUNBUFFERED by -u where Python is told to ignore its variables (-E, -I)."""
    ignores_variables = "-E" in python or "-I" in python
    return [*python, *(["-u"] if ignores_variables and environ.get("PYTHONUNBUFFERED") else [])]


def cannot_start(error: OSError) -> LaunchError:
    """Return the error for a process that the operating system cannot start."""
    fixes = {
        errno.E2BIG: "shorten the arguments or the environment",
        errno.EMFILE: "raise the limit of open files: `ulimit -n 4096`",
        errno.EAGAIN: "raise the limit of processes: `ulimit -u`, or start fewer ranks",
        errno.ENOMEM: "start fewer ranks, or free some memory",
    }
    return LaunchError(
        f"the ranks cannot be started: {error.strerror}",
        where="the operating system",
        fix=fixes.get(error.errno or 0, "reinstall Headway in a working Python"),
    )
