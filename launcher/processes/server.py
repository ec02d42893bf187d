"""The fork server: starts ranks for the launcher, and terminates them when the launcher exits.

The server starts before the launcher's own imports and runs in parallel with them. To fork ranks,
it imports torch once; it then has one Python thread, no CUDA context, and its own session. Requests
are JSON over a socket; replies are records. A request carries the rank's stdin, stdout, stderr and
status channel. When the launcher exits, even if it is killed, the server terminates all of its
descendants. It adopts orphans among them, and reaps them when they exit.

The server's parent is the guardian, which terminates the processes that a killed launcher and
server leave behind. The launcher, the guardian and the server form a chain, in which each adopts
the orphans of the processes below it. If one or two of the three are killed, another stops the run:
the server when the launcher's socket closes, the guardian when the server exits, the launcher when
both have exited. If all three are killed at once, the kernel kills the ranks through their
parent-death signals, but not the ranks' child processes.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import NamedTuple

from headway.devices.table import is_kind, kind_of
from headway.ipc import signals
from headway.ipc.forking import (
    adopt_orphans,
    die_with_parent,
    init_child,
    reap,
    resume_on_parent_exit,
    set_title,
    wake_on_child_exit,
)
from headway.ipc.records import ProcessExit, ProcessStart, Record, ServerReady, StartFailed
from headway.ipc.run_contract import CPUS_VARIABLE, epoch_time, read_run
from headway.ipc.typed import encode
from headway.launcher.plan.program import interpreter
from headway.launcher.processes.shutdown import KILL_MARGIN_S, has_children, terminate_descendants
from headway.launcher.rank import import_hooks, rank_monitor, worker

_MARGIN_S = KILL_MARGIN_S + 5.0  # for the server to kill processes after the grace period
_NEVER = float("inf")
_PRELOAD_AFTER_S = 5.0  # after this time without an event, the ranks' own imports have finished
_CHECKPOINTS, _COMPILER = "torch.distributed.checkpoint", "torch._dynamo"
# from a rank; ignored by default, so that a late one has no effect
_COMPILER_IMPORTED, _ENVIRONMENT_CHANGED = signal.SIGURG, signal.SIGWINCH


class ServerArgs(NamedTuple):
    method: str  # fork, exec; program: not a Python script
    grace_s: float
    kind: str  # script or module
    name: str
    args: list[str]


class Rank(NamedTuple):
    env: dict[str, str]
    fds: list[int]  # stdin, stdout, stderr, status channel


def main() -> None:
    """Serve until the launcher exits; in a forked rank, run the program and return."""
    fd, method, grace_s, _title_space, kind, name, *args = sys.argv[1:]
    job = ServerArgs(method, float(grace_s), kind, name, args)
    atexit.register(worker.finish_process)
    # the launcher handles these signals
    signals.ignore_until_exec(signal.SIGINT, signal.SIGQUIT, *worker.USER_SIGNALS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, worker.USER_SIGNALS)  # blocked by the launcher
    server = socket.socket(fileno=int(fd))
    server.set_inheritable(False)
    _fork_under_guardian(server, job.grace_s)
    _reply(server, ServerReady(os.getpid()))
    adopt_orphans()  # a fork clears this setting
    if method == "fork":
        _warm_up()
    # before this call, SIGTERM terminates this process at once, even during an import
    signals.ignore_until_exec(signal.SIGTERM, signal.SIGXCPU)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signals.ignore_until_exec(signal.SIGHUP)
    rank = _Server(server, job).serve()
    if rank is None:
        os._exit(0)  # skips torch's finalization, which takes 0.25 s
    set_title(f"{os.path.basename(name)} rank {os.environ['RANK']}")
    rank_monitor.start(rank.fds[3])
    import_hooks.hide_torch()
    if method == "fork":
        report = partial(_report_compiler, os.getppid(), dict(os.environ))
        import_hooks.call_after_import(_COMPILER, report)
    worker.run_program(kind, name, args, blocked=worker.STOP_SIGNALS)


def _warm_up() -> None:
    """Import torch, and exempt its objects from garbage collection."""
    import torch.distributed

    run = read_run()
    if run is not None and is_kind(run.device):
        with suppress(ImportError):  # a rank reports the error
            kind_of(run.device).load()
    assert torch
    gc.collect()
    gc.freeze()


def _report_compiler(server: int, environ: Mapping[str, str], _: object) -> None:
    """Notify the server that torch's compiler was imported, and if the environment has changed.

    Creating an optimizer imports it, which takes longer than all of the launcher's own work. Its
    configuration is read from the environment, which the script may have changed.
    """
    ignored = {"TORCHINDUCTOR_CACHE_DIR": ""}  # set by the import, and read later
    is_same = {**os.environ, **ignored} == {**environ, **ignored}
    if os.getppid() == server:
        os.kill(server, _COMPILER_IMPORTED if is_same else _ENVIRONMENT_CHANGED)


def _fork_under_guardian(launcher: socket.socket, grace_s: float) -> None:
    """Fork, and return in the child; this process becomes its guardian.

    The guardian exits with the child's exit code. If processes on this system cannot adopt orphans,
    this function does nothing. The other end of `launcher` closes when the launcher exits or stops
    the child. The child then gives other processes `grace_s` seconds to exit.
    """
    if not adopt_orphans():
        return
    try:
        server = os.fork()
    except OSError as error:  # as in `_start`
        _reply(launcher, StartFailed(error.errno or 0))
        os._exit(1)
    resume_on_parent_exit()  # a suspended guardian cannot terminate processes
    if server == 0:
        os.setsid()  # signals to the guardian's process group do not reach the server
        return
    # a cluster may send these signals to all processes
    signals.ignore_until_exec(signal.SIGTERM, signal.SIGXCPU, *worker.USER_SIGNALS)
    # without Headway's or the script's name: `pkill -f` must not kill the guardian
    set_title(f"guardian of process {os.getppid()}")
    status = _wait_for_server(server, launcher, grace_s)
    if status != 0:
        terminate_descendants(0)
    os._exit(signals.shell_exit_code(os.waitstatus_to_exitcode(status)))


def _wait_for_server(server: int, launcher: socket.socket, grace_s: float) -> int:
    """Return the server's wait status; kill the server if it outlives the launcher by too long."""
    child_ended, _ = wake_on_child_exit()
    poll = select.poll()
    poll.register(child_ended, select.POLLIN)
    # ready when the launcher exits or closes its end; only the server reads its messages
    poll.register(launcher, select.POLLRDHUP)
    kill_at = _NEVER
    while True:
        for pid, status in reap():
            if pid == server:
                return status
        left_s = kill_at - time.monotonic()
        if left_s <= 0:
            os.kill(server, signal.SIGKILL)
            kill_at = _NEVER
            continue
        for fd, _ in poll.poll(None if left_s == _NEVER else left_s * 1000):
            if fd == child_ended:
                with suppress(BlockingIOError):
                    os.read(child_ended, 4096)
            else:
                poll.unregister(fd)
                os.kill(server, signal.SIGCONT)  # a suspended server cannot terminate processes
                os.kill(server, signal.SIGTERM)  # terminates a server that has not started a rank
                kill_at = time.monotonic() + grace_s + _MARGIN_S


class _Server:
    def __init__(self, launcher: socket.socket, job: ServerArgs) -> None:
        self._launcher = launcher
        self._job = job
        self._wake_fds = wake_on_child_exit()
        self._ranks: set[int] = set()  # pids
        self._has_restarts = False
        self._to_preload: set[str] = set()
        self._has_other_environment = False  # of a rank, when it imported the compiler
        # these signals still wake the server
        signals.ignore_until_exec(_COMPILER_IMPORTED, _ENVIRONMENT_CHANGED)
        self._selector = selectors.DefaultSelector()
        for fd in (launcher.fileno(), self._wake_fds[0]):
            self._selector.register(fd, selectors.EVENT_READ)

    def serve(self) -> Rank | None:
        """Serve until the launcher exits, then return None; in a forked child, return the rank."""
        while True:
            timeout_s = _PRELOAD_AFTER_S if self._to_preload and self._has_restarts else None
            ready = {key.fd for key, _ in self._selector.select(timeout_s)}
            if not ready:
                self._preload()
            if self._wake_fds[0] in ready:
                self._reap()
            if self._launcher.fileno() not in ready:
                continue
            request = _receive(self._launcher)
            if request is None:
                terminate_descendants(self._job.grace_s if self._ranks else 0)
                return None
            if self._start(request) == 0:
                return request

    def _start(self, rank: Rank) -> int | None:
        """Start a rank; return its pid, 0 in the forked child, or None if it cannot be started."""
        here = os.getpid()
        try:
            pid = _fork() if self._job.method == "fork" else _spawn(self._job, rank)
        except OSError as error:  # too many processes, or too little memory
            _reply(self._launcher, StartFailed(error.errno or 0))
            pid = None
        if pid == 0:
            _init_rank(here, rank)
            self._close()  # now that no signal writes to the pipe
            return 0
        for theirs in rank.fds:
            os.close(theirs)
        if pid is None:
            return None
        if not self._ranks and self._job.method == "fork":
            self._has_restarts = rank.env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            self._to_preload |= {_CHECKPOINTS} - sys.modules.keys()
        self._ranks.add(pid)
        _reply(self._launcher, ProcessStart(pid))
        return pid

    def _preload(self) -> None:
        """Import modules that a restarted rank needs: the readers of checkpoints, and the compiler.

        They are imported while the ranks train, and only if the ranks can be restarted. Their
        objects are not frozen, because nanobind would report those of triton as leaks at exit.
        """
        environ = {**os.environ}
        with suppress(Exception):  # a rank that imports it reports the error
            while self._to_preload:
                import_module(self._to_preload.pop())
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]

    def _reap(self) -> None:
        """Reap adopted orphans, and report the ranks that have exited."""
        received = os.read(self._wake_fds[0], 4096)  # numbers of signals
        self._has_other_environment |= _ENVIRONMENT_CHANGED in received
        if self._has_other_environment:
            self._to_preload.discard(_COMPILER)
        elif _COMPILER_IMPORTED in received and _COMPILER not in sys.modules:
            self._to_preload.add(_COMPILER)
        with suppress(ChildProcessError):
            for pid, status in reap():
                if pid in self._ranks:
                    ended = epoch_time()
                    self._ranks.remove(pid)
                    leftovers = not self._ranks and has_children()
                    code = os.waitstatus_to_exitcode(status)
                    _reply(self._launcher, ProcessExit(pid, code, ended, leftovers))

    def _close(self) -> None:
        """Close the server's descriptors in a forked child."""
        self._selector.close()
        self._launcher.close()
        for fd in self._wake_fds:
            os.close(fd)


def _receive(server: socket.socket) -> Rank | None:
    try:
        message, fds, _, _ = socket.recv_fds(server, 2**20, 4)
    except OSError:
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    return Rank(json.loads(message), fds) if message else None


def _reply(server: socket.socket, record: Record) -> None:
    with suppress(OSError):  # the launcher has exited; the next read returns EOF
        server.sendall(encode(record))


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block stop signals while a process is started; in a forked child, they stay blocked."""
    here, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, worker.STOP_SIGNALS)
    try:
        yield
    finally:
        if os.getpid() == here:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork() -> int:
    with warnings.catch_warnings(), _stop_signals_blocked():
        # Python warns about OpenBLAS's idle thread pool, which survives a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _spawn(job: ServerArgs, rank: Rank) -> int:
    here, cpus = os.getpid(), rank.env.pop(CPUS_VARIABLE, "")
    stdin, stdout, stderr, channel = rank.fds

    def prepare() -> None:
        die_with_parent(here)
        bind(cpus)

    command = [job.name, *job.args]
    is_ours = job.method == "exec"
    if is_ours:
        arguments = [str(channel), job.kind, *command]
        command = [*interpreter(), "-c", worker.bootstrap_code("rank.worker"), *arguments]
    try:
        with _stop_signals_blocked() if is_ours else nullcontext():
            process = subprocess.Popen(
                command,
                env={**os.environ, **rank.env},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[channel] if is_ours else [],
                start_new_session=True,
                preexec_fn=prepare,
            )
    except OSError as error:
        if is_ours:
            raise
        os.write(stderr, f"{job.name}: {error.strerror}\n".encode())
        return _fork() or os._exit(127)  # as a shell would
    process.returncode = 0  # reaped by the server, not by Popen
    return process.pid


def _init_rank(server_pid: int, rank: Rank) -> None:
    """Make the forked process behave like a new interpreter for this rank."""
    import torch

    init_child(server_pid, rank.fds[:3])
    bind(rank.env.pop(CPUS_VARIABLE, ""))
    os.environ.update(rank.env)
    signals.reset_handlers(*worker.STOP_SIGNALS, *worker.USER_SIGNALS, signal.SIGXCPU)
    signals.reset_handlers(_COMPILER_IMPORTED, _ENVIRONMENT_CHANGED)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.reset_handlers(signal.SIGHUP)
    _reopen_streams()
    # the fork copied these generators; `random` reseeds itself
    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def bind(cpus: str) -> None:
    """Bind this process to those cores in `cpus` that are also in its current affinity mask."""
    wanted: set[int] = set()
    for part in filter(None, cpus.split(",")):
        first, _, last = part.partition("-")
        wanted.update(range(int(first), int(last or first) + 1))
    if wanted and (here := wanted & os.sched_getaffinity(0)):
        os.sched_setaffinity(0, here)


def _reopen_streams() -> None:
    """Reopen the standard streams with new buffers, even if they are None or were replaced."""
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
