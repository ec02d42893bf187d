"""The fork server: a process that starts the ranks for the launcher, and ends them all with it.

It starts before the launcher's own imports and runs in parallel with them. To fork ranks it imports
torch once; it then has one Python thread, no CUDA context, and a session of its own. Requests
are JSON over a socket, answers are records; a request carries the rank's stdin, stdout, stderr,
status channel and pipe of stacks. When the launcher ends, also if it is killed, all descendants of
this process are ended.
"""

from __future__ import annotations

import array
import atexit
import gc
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import NamedTuple

from headway.contract.records import Ended, NotStarted, Record, Started, encode_record
from headway.launcher.inside import preloaded, rank_monitor, worker
from headway.launcher.inside.process_cleanup import adopt_orphans, die_with_parent, end_descendants
from headway.launcher.planning.program import interpreter


class Job(NamedTuple):
    """What all ranks share, from this process's command line."""

    method: str  # fork, exec; program: not a Python script
    grace_s: float
    kind: str  # script or module
    name: str
    args: list[str]


class Rank(NamedTuple):
    """A request to start one rank."""

    env: dict[str, str]
    fds: list[int]  # stdin, stdout, stderr, status channel, stacks


def main() -> None:
    """Serve until the launcher has ended; in a forked rank, run the program and return."""
    fd, method, grace_s, _room, kind, name, *args = sys.argv[1:]
    job = Job(method, float(grace_s), kind, name, args)
    atexit.register(worker.finish_process)
    for number in worker.STOP_SIGNALS:  # the launcher stops this process; exec resets handlers
        signal.signal(number, lambda *_: None)
    server = socket.socket(fileno=int(fd))
    server.set_inheritable(False)
    adopt_orphans()
    if method == "fork":
        _warm_up()
    rank = _serve(server, job)
    if rank is None:
        os._exit(0)  # skips torch's finalization, which takes 0.25 s
    set_title(f"{os.path.basename(name)} rank {os.environ['RANK']}")
    rank_monitor.start(*rank.fds[3:])
    preloaded.hand_out_torch()
    worker.run_program(kind, name, args, blocked=worker.STOP_SIGNALS)


def _warm_up() -> None:
    """Import torch, and exempt its objects from garbage collection."""
    with preloaded.recorded_filters():
        import torch.distributed

    assert torch
    gc.collect()
    gc.freeze()


def _serve(server: socket.socket, job: Job) -> Rank | None:
    """Serve requests; return None when the launcher has ended, or the rank in a forked child."""
    selector = selectors.DefaultSelector()
    selector.register(server, selectors.EVENT_READ)
    ranks: dict[int, int] = {}  # by pid, a descriptor that is readable when the rank has ended
    here = os.getpid()
    while True:
        for key, _ in selector.select():
            if key.fileobj is not server:
                pid, fd = key.data, key.fd
                selector.unregister(fd)
                del ranks[pid]
                _answer(server, Ended(pid, _reap(pid, fd), time.time()))
                continue
            rank = _receive(server)
            if rank is None:
                end_descendants(job.grace_s if ranks else 0)
                return None
            try:
                pid = _fork() if job.method == "fork" else _start_fresh(job, rank)
            except OSError as error:  # too many processes, or too little memory
                for fd in rank.fds:
                    os.close(fd)
                _answer(server, NotStarted(error.errno or 0))
                continue
            if pid == 0:
                selector.close()
                server.close()
                for fd in ranks.values():
                    os.close(fd)
                _become_rank(here, rank)
                return rank
            for fd in rank.fds:
                os.close(fd)
            ranks[pid] = _watch(pid)
            selector.register(ranks[pid], selectors.EVENT_READ, pid)
            _answer(server, Started(pid))


def _receive(server: socket.socket) -> Rank | None:
    fds = array.array("i")
    try:
        message, ancillary, _, _ = server.recvmsg(2**20, socket.CMSG_LEN(5 * fds.itemsize))
    except OSError:
        return None
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    return Rank(json.loads(message), list(fds)) if message else None


def _answer(server: socket.socket, record: Record) -> None:
    with suppress(OSError):  # the launcher has ended; the next request is the end of the stream
        server.sendall(encode_record(record))


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block stop signals while a process is started; in a forked child they stay blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, worker.STOP_SIGNALS)
    here = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == here:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork() -> int:
    with warnings.catch_warnings(), _stop_signals_blocked():
        # Python warns of OpenBLAS's idle thread pool, which survives a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _start_fresh(job: Job, rank: Rank) -> int:
    stdin, stdout, stderr, *ours = rank.fds
    command = [job.name, *job.args]
    is_ours = job.method == "exec"
    if is_ours:
        arguments = [str(os.getpid()), *map(str, ours), job.kind, *command]
        command = [*interpreter(), "-c", worker.bootstrap_code("inside.worker"), *arguments]
    try:
        with _stop_signals_blocked() if is_ours else nullcontext():
            process = subprocess.Popen(
                command,
                env={**os.environ, **rank.env},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=ours if is_ours else [],
                start_new_session=True,
            )
    except OSError as error:
        if is_ours:
            raise
        os.write(stderr, f"{job.name}: {error.strerror}\n".encode())
        return _fork() or os._exit(127)  # as a shell would
    process.returncode = 0  # reaped in _reap, not by Popen
    return process.pid


_statuses: dict[int, int] = {}  # by pid, on systems without pidfds


def _watch(pid: int) -> int:
    """Return a descriptor that is readable once process `pid` has ended."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    reading, writing = os.pipe()

    def wait() -> None:
        _statuses[pid] = os.waitpid(pid, 0)[1]
        os.close(writing)

    threading.Thread(target=wait, daemon=True).start()
    return reading


def _reap(pid: int, fd: int) -> int:
    os.close(fd)
    status = _statuses.pop(pid) if pid in _statuses else os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


def _become_rank(server_pid: int, rank: Rank) -> None:
    """Set up the forked process like a new interpreter for this rank."""
    die_with_parent(server_pid)
    os.setsid()
    for target, fd in enumerate(rank.fds[:3]):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.update(rank.env)
    for number in worker.STOP_SIGNALS:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    _reopen_streams()
    _reseed()


def _reseed() -> None:
    """Reseed torch's and NumPy's generators, which the fork copied; `random` reseeds itself."""
    import torch

    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _reopen_streams() -> None:
    """Reopen Python's three standard streams with the buffering of a new process.

    Those of the server may be None (closed), or what a sitecustomize has put there.
    """
    unbuffered = getattr(sys.stdout, "write_through", False)  # by -u or PYTHONUNBUFFERED
    usual = {"stderr": "backslashreplace"}
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, name)
        raw = open(fd, mode + "b", buffering=0 if unbuffered and fd else -1, closefd=False)  # noqa: SIM115
        getattr(raw, "raw", raw).name = f"<{name}>"  # type: ignore[misc]
        stream = io.TextIOWrapper(
            raw,
            encoding=getattr(old, "encoding", None),
            errors=getattr(old, "errors", usual.get(name)),
            newline=None if fd == 0 else "\n",
            line_buffering=(fd == 2 or raw.isatty()) and not unbuffered,
            write_through=unbuffered and fd != 0,
        )
        stream.mode = mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def set_title(title: str) -> None:
    """Overwrite this process's arguments with `title`, which `ps` then shows. Linux only.

    Source: proc(5), /proc/pid/stat fields 48 and 49 (arg_start, arg_end).
    """
    import ctypes

    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return
    if end > start:
        text = title.encode(errors="surrogateescape")[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
