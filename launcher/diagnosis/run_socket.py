"""The socket on which a launcher answers the same user's `headway stack` and `headway top`.

On Linux, the socket's address is in the abstract namespace: it needs no folder, no file can replace
it, and the kernel removes it when the launcher exits. Both ends verify the user of their peer. On
other systems, the socket is a file in a folder that only this user can access.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, NamedTuple

from headway.ipc.typed import read
from headway.launcher.diagnosis.stacks import read_state

_HAS_ABSTRACT_NAMES = sys.platform == "linux"
_PREFIX = "headway-run"
_TIMEOUT_S = 5.0  # per message, excluding the time to prepare the answer
_REQUEST_TIMEOUT_S = 1.0  # from connection to request; other clients wait
_RETRY_DELAY_S = 0.1  # after a failed accept, so that the loop does not spin
_MAX_REQUEST = 4096  # bytes
_NO_STATS: dict[str, Any] = {"ranks": [], "slowest": None, "words": []}
_UCRED = struct.Struct("3i")  # pid, user and group; unix(7), SO_PEERCRED


class ActiveRun(NamedTuple):
    pid: int  # of the launcher
    program: str
    num_processes: int  # on this machine
    machine_rank: int
    num_machines: int
    began_at: float  # seconds since the epoch
    is_suspended: bool = False  # then only the pid is known

    @property
    def ranks(self) -> str:
        if self.num_machines == 1:
            return str(self.num_processes)
        return f"{self.num_processes} (machine {self.machine_rank} of {self.num_machines})"


class RunSocket:
    """Answers requests in a dedicated thread, one after another, until `close` is called."""

    def __init__(self, run: ActiveRun) -> None:
        self.describe: Callable[[], str] = lambda: "no rank has started yet"
        """Returns the positions of the ranks."""
        self.stats: Callable[[], dict[str, Any]] = lambda: {**_NO_STATS}
        """Returns the step statistics of the ranks as JSON objects."""
        self._run = run
        self._is_closing = False
        self._address = _new_address()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._address)
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, name="headway-socket", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads
            self._socket.close()
            raise OSError(errno.EAGAIN, str(error)) from None

    def close(self) -> None:
        self._is_closing = True
        with suppress(OSError):  # wakes the thread on Linux
            self._socket.shutdown(socket.SHUT_RDWR)
        if not _HAS_ABSTRACT_NAMES:  # on other systems, a connection wakes it
            with suppress(OSError), closing(socket.socket(socket.AF_UNIX)) as waking:
                waking.connect(self._address)
        self._thread.join()
        self._socket.close()
        if not _HAS_ABSTRACT_NAMES:
            os.unlink(self._address)

    def _serve(self) -> None:
        while not self._is_closing:
            try:
                self._answer(self._socket.accept()[0])
            except OSError:  # too many open files, or `close`
                if not self._is_closing:
                    time.sleep(_RETRY_DELAY_S)

    def _answer(self, connection: socket.socket) -> None:
        with closing(connection), suppress(OSError, ValueError, TypeError, RecursionError):
            if not _is_same_user(connection):
                return
            connection.settimeout(_REQUEST_TIMEOUT_S)
            request = json.loads(connection.recv(_MAX_REQUEST))
            answer: dict[str, Any] = {"run": self._run._asdict(), "stats": self.stats()}
            if "stacks" in request:
                answer["stacks"] = self.describe()
            connection.sendall(json.dumps(answer).encode())


def list_runs() -> list[ActiveRun]:
    """Return this user's active runs on this machine, oldest first."""
    return [run for run, _ in request_stats()]


def request_stats() -> list[tuple[ActiveRun, dict[str, Any]]]:
    """Return this user's active runs on this machine with their statistics, oldest first."""
    answers = [_ask(address) for address in _list_addresses()]
    found = [(run, answer.get("stats", _NO_STATS)) for run, answer in answers if run is not None]
    return sorted(found, key=lambda pair: pair[0].began_at)


def request_stacks(pid: int, timeout_s: float) -> str | None:
    """Return a launcher's report on its ranks; None if the launcher has exited.

    Raises TimeoutError if the launcher does not answer within `timeout_s`.
    """
    for address in _list_addresses():
        run, _ = _ask(address)
        if run is not None and run.pid == pid:
            return _send_request(address, {"stacks": "all"}, timeout_s)[1].get("stacks")
    return None


class _NoAnswer(TimeoutError):
    """Raised if a launcher of this user does not answer; the argument is its pid."""


def _ask(address: str) -> tuple[ActiveRun | None, dict[str, Any]]:
    """Return the run at this address and its launcher's answer, which is {} if it is suspended.

    The run is None if the launcher has exited or does not answer.
    """
    try:
        return _send_request(address, {}, _TIMEOUT_S)
    except _NoAnswer as no_answer:
        (pid,) = no_answer.args
    if not read_state(pid).is_stopped:
        return None, {}
    began_at = os.stat(f"/proc/{pid}").st_ctime
    return ActiveRun(pid, "", 0, 0, 1, began_at, is_suspended=True), {}


def _send_request(
    address: str, request: dict[str, Any], timeout_s: float
) -> tuple[ActiveRun | None, dict[str, Any]]:
    """Return the run and answer of the launcher at `address`; None and {} if it does not answer."""
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(address)
            if not _is_same_user(connection):
                return None, {}
            connection.sendall(json.dumps(request).encode())
            answer = json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))
            run = read(ActiveRun, answer["run"])
            return run._replace(pid=peer_of(connection)[0] or run.pid), answer
        except TimeoutError:
            raise _NoAnswer(peer_of(connection)[0]) from None
        except (OSError, ValueError, TypeError, KeyError):  # exited, or another version
            return None, {}


def _is_same_user(connection: socket.socket) -> bool:
    return peer_of(connection)[1] == os.geteuid()


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and user of the peer process, according to the kernel."""
    if not _HAS_ABSTRACT_NAMES:  # other users cannot access the folder
        return 0, os.geteuid()
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, user, _ = _UCRED.unpack(credentials)
    return pid, user


def _new_address() -> str:
    name = os.urandom(4).hex()  # pids are not unique if containers share a network
    if _HAS_ABSTRACT_NAMES:
        return f"\0{_PREFIX}-{os.geteuid()}-{name}"
    return os.path.join(_create_private_folder(runtime_folder()), name)


def _list_addresses() -> list[str]:
    if _HAS_ABSTRACT_NAMES:
        return [f"\0{name}" for name in abstract_names(f"{_PREFIX}-{os.geteuid()}-")]
    folder = runtime_folder()
    with suppress(PermissionError):
        return [os.path.join(folder, name) for name in os.listdir(_create_private_folder(folder))]
    return []


def abstract_names(prefix: str) -> list[str]:
    """Return the sorted names in Linux's abstract namespace that start with `prefix`; see proc(5).

    The names must not contain blanks.
    """
    names: set[str] = set()
    with (
        suppress(OSError),  # missing in some sandboxes
        open("/proc/net/unix", encoding="utf-8", errors="replace") as file,
    ):
        names = {line.split()[-1] for line in file}
    return sorted(name[1:] for name in names if name.startswith(f"@{prefix}"))


def runtime_folder() -> str:
    """Return the folder for this user's sockets on systems without abstract socket names."""
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"headway-run-{os.geteuid()}")


def _create_private_folder(folder: str) -> str:
    """Create a folder for this user only; raises PermissionError if other users can access it."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    is_open = not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077
    if is_open or status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "not a folder, or accessible to other users", folder)
    return folder
