"""Starts Python programs from a process that has imported torch: half the CPU time of a launch.

The warm process forks. What it starts has the parent, process group, streams, variables, working
directory, arguments and signal handlers of a program that is executed. What Python and torch settle
when they start is the warm process's: programs with other variables for them are executed, and so
are those with options of Popen that a fork cannot have.

A launch that is to start a fork server, also one that replaces another program, gets another fork
beside it, its child, which becomes that server when the launcher starts it. The ranks start as
always, but what scripts with an optimizer or a checkpoint import of torch is in memory, too.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from headway.launcher.processes import server
from headway.launcher.rank import import_hooks

_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "TORCH", *import_hooks.READ_AT_IMPORT)
_CORES = str(len(os.sched_getaffinity(0))) if sys.platform == "linux" else ""
_PROGRAMS = ("-c", "-m")
_SUPERVISED = {"--supervise", "--num-machines", "--num-processes", "--profile"}
_POSSIBLE = {"env", "cwd", "stdin", "stdout", "stderr", "text"}  # options of Popen
_LONGEST = 2**17  # of a request
_ROOM = "-" * 200  # in the command line, which titles of forks overwrite
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class WarmPython:
    """A process with torch in memory that forks others.

    Args:
        environ: its variables; those that Python and torch read at their start hold for its forks.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), _ROOM]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # no terminal: stdout is buffered as in a pipe
                pass_fds=[theirs.fileno()],
            )

    def can_start(self, command: Sequence[str], options: Mapping[str, Any]) -> bool:
        """Return whether a fork is the same as a Popen with these words and options."""
        is_settled = _is_settled(options["env"], self._environ)
        return _is_plain(command) and is_settled and options.keys() <= _POSSIBLE

    def fork(
        self, command: Sequence[str], cwd: str | None, env: Mapping[str, str], fds: Sequence[int]
    ) -> int:
        """Fork a child of the calling process that runs this command, and return its pid.

        Args:
            command: Python, and a script or `-m` and a module, with arguments.
            cwd: its working directory; None: the caller's.
            env: its variables.
            fds: its three standard streams.
        """
        request = json.dumps([[*command], os.path.abspath(cwd or ""), dict(env)]).encode()
        with _adopting_orphans():
            socket.send_fds(self._socket, [request], [*fds])
            return int(self._socket.recv(_LONGEST))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class WarmPopen(subprocess.Popen[str]):
    """A Popen whose process is forked by a warm Python.

    Overrides a private method, in which Popen's constructor does all that differs between systems.
    """

    def __init__(self, python: WarmPython, command: Sequence[str], **options: Any) -> None:
        self._python = python
        super().__init__(command, **options)

    def _execute_child(self, command: Sequence[str], *details: Any) -> None:
        cwd, env, pipes = details[4], details[5], details[9:15]
        fds = [own if fd == -1 else fd for own, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = self._python.fork(command, cwd, env, fds)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _ServerPopen(subprocess.Popen[bytes]):
    """The Popen of a launcher, whose fork server is a child that it has already."""

    reserved: socket.socket  # whose other end waits in that child
    pid_of_reserved = 0  # 0: there is none any more

    def _execute_child(self, command: Sequence[str], *details: Any) -> None:
        (passed,), cwd, env, pipes = details[3], details[4], details[5], details[9:15]
        cls = type(self)
        usual = {**_environ_of_fork, "PYTHONUNBUFFERED": env.get("PYTHONUNBUFFERED", "")}
        if not cls.pid_of_reserved or not _is_settled(env, usual):
            super()._execute_child(command, *details)  # type: ignore[misc]
            return
        self.pid, cls.pid_of_reserved = cls.pid_of_reserved, 0
        ignored = [sig for sig in signal.valid_signals() if signal.getsignal(sig) == signal.SIG_IGN]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        folder = os.path.abspath(cwd or "")
        request = json.dumps([[*command], folder, dict(env), passed, ignored, [*blocked]]).encode()
        with cls.reserved:
            socket.send_fds(cls.reserved, [request], [pipes[0], 1, 2, passed])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


_execve = os.execve
_environ_of_fork: dict[str, str] = {}  # of this process's warm Python


def reserve_server() -> bool:
    """Fork the later fork server of this launcher; return in it, once it is one, with True."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = _fork()
    if pid != 0:
        from headway.launcher.processes import starter

        theirs.close()
        _ServerPopen.reserved, _ServerPopen.pid_of_reserved = ours, pid
        vars(starter)["subprocess"] = SimpleNamespace(
            Popen=_ServerPopen, DEVNULL=subprocess.DEVNULL
        )
        return False
    os.setsid()
    ours.close()
    request, fds, _, _ = socket.recv_fds(theirs, _LONGEST, 4)
    if not request:  # the launcher has ended, or is another program now
        os._exit(0)
    theirs.close()
    command, cwd, env, passed, ignored, blocked = json.loads(request)
    _become(cwd, env, fds[:3])
    if fds[3] != passed:
        os.dup2(fds[3], passed)
        os.close(fds[3])
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    sys.orig_argv[:] = command
    sys.argv = ["-c", *command[command.index("-c") + 2 :]]
    return True


def serve(requests: socket.socket) -> list[str]:
    """Fork until the socket's other end is closed; return in a fork, with its command line."""
    while True:
        request, fds, _, _ = socket.recv_fds(requests, _LONGEST, 3)
        if not request:
            os._exit(0)
        if _fork_orphan():
            requests.sendall(str(os.getpid()).encode())
            requests.close()
            command, cwd, env = json.loads(request)
            _become(cwd, env, fds)
            return [*command]
        for fd in fds:
            os.close(fd)


def _fork() -> int:
    with warnings.catch_warnings():  # of OpenBLAS's idle threads, which survive a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _fork_orphan() -> bool:
    """Fork a process, which another adopts because its parent ends; return whether it is this."""
    reading, writing = os.pipe()
    parent = _fork()
    if parent == 0 and _fork() != 0:
        os._exit(0)
    if parent != 0:
        os.waitpid(parent, 0)
    os.close(writing)
    if parent == 0:
        os.read(reading, 1)  # until the parent is gone and the warm process has closed its end
    os.close(reading)
    return parent == 0


def _become(cwd: str, env: Mapping[str, str], fds: Sequence[int]) -> None:
    """Give this process a working directory, variables, with the modules there, and streams."""
    for own, fd in enumerate(fds):
        os.dup2(fd, own)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    _show_environ(env)
    os.chdir(cwd)
    extra = map(os.path.abspath, _own_path(env, _environ_of_fork))
    sys.path[1:1] = [path for path in extra if path not in sys.path]
    if env.get("OMP_NUM_THREADS") == "1":
        sys.modules["torch"].set_num_threads(1)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.stdout.reconfigure(write_through=bool(env.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    server._reopen_streams()


class _Executed(BaseException):
    """This process becomes another program: its words and variables."""

    args: tuple[Sequence[str], Mapping[str, str]]


def _execute(path: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Do as os.execve() does, but with torch in memory where that is the same."""
    vars(os)["execve"] = _execve
    is_settled = _is_settled(environ, _environ_of_fork)
    if _ServerPopen.pid_of_reserved:
        _ServerPopen.reserved.close()
        os.waitpid(_ServerPopen.pid_of_reserved, 0)
    if _is_plain(command) and is_settled and threading.active_count() == 1:
        raise _Executed(command, dict(environ))
    os.execve(path, [*command], environ)


def _run_in_place(command: Sequence[str], environ: Mapping[str, str], modules: set[str]) -> None:
    """Run a program as if it had replaced the one that ran until now."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    _forget_modules(modules)
    _become(os.getcwd(), environ, ())
    sys.orig_argv[:] = command
    if _has_server(command) and reserve_server():
        _serve_ranks(modules)
    else:
        _run(command)


def _forget_modules(usual: Collection[str]) -> None:
    for name in [*sys.modules]:
        if name not in usual or name.startswith(("headway", "tests")):
            _forgotten.append(sys.modules.pop(name))


_forgotten: list[object] = []  # kept: what they opened stays open


def _show_environ(env: Mapping[str, str]) -> None:
    """Let the system show these variables of this process, as far as there is room for them.

    Source: proc(5), /proc/pid/stat fields 50 and 51 (env_start, env_end).
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    home_first = sorted(env.items(), key=lambda one: one[0] != "HOME")
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in home_first)
    ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


def _is_settled(environ: Mapping[str, str], usual: Mapping[str, str]) -> bool:
    """Return whether a fork of a process with the usual variables can have these."""
    ends_alike = environ.get("PYTHONPATH", "").endswith(usual["PYTHONPATH"])
    return ends_alike and _read_at_start(environ) == _read_at_start(usual)


def _own_path(environ: Mapping[str, str], usual: Mapping[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH that come before the usual ones."""
    own = environ["PYTHONPATH"].removesuffix(usual["PYTHONPATH"])
    return [word for word in own.split(os.pathsep) if word]


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a fork cannot have otherwise; for the rest see _become()."""
    live = ("TORCH_FR_BUFFER_SIZE", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONBREAKPOINT")
    names = {name for name in environ if name.startswith(_READ_AT_START)}.difference(live)
    read = {name: environ[name] for name in names}
    if read.get("OMP_NUM_THREADS", "") in ("1", _CORES):
        del read["OMP_NUM_THREADS"]
    return {var: text for var, text in read.items() if text and not var.startswith("TORCHELASTIC")}


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make orphans among the descendants of this process its children. Source: prctl(2)."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _run(command: Sequence[str]) -> None:
    """Run a command line as Python does when it starts."""
    sys.orig_argv[:] = command
    kind, is_program = command[1], command[1] in _PROGRAMS
    sys.argv = [*command[2 if is_program else 1 :]]
    if kind == "-c":
        sys.argv[0], sys.path[0] = kind, ""
        exec(command[2], {"__name__": "__main__"})  # noqa: S102 - Python's own -c does
    elif is_program:
        sys.path[0] = os.getcwd()
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(command[1]))
        runpy.run_path(command[1], run_name="__main__")


def _skip_destructors() -> None:
    """Let forks end without the destructors of torch's libraries, which take 0.3 s; on glibc.

    What is registered later, and Python's own end, comes before. Source: exit(3), on_exit(3).
    """
    for finalizer in vars(weakref.finalize)["_registry"]:  # of torch's operators
        finalizer.atexit = False
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc["_exit"], None)
        libc["__cxa_atexit"](libc.fflush, None, None)


def _run_to_end(program: Callable[..., object], *arguments: object) -> NoReturn:
    """Run a program, and end as Python does, but do not destroy torch's modules: it takes 0.2 s.

    Raise SystemExit where the code is no number, or a stream cannot be written: Python reports it.
    """
    ended = SystemExit(0)
    try:
        program(*arguments)
    except SystemExit as error:
        ended = error
    vars(threading)["_shutdown"]()  # which waits for threads
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
        if ended.code is None or isinstance(ended.code, int):
            ctypes.CDLL(None).fflush(None)
            os._exit(ended.code or 0)
    raise ended


def _is_plain(command: Sequence[str]) -> bool:
    """Return whether this is a program for this Python, without flags for Python itself."""
    return command[0] == sys.executable and (command[1][0] != "-" or command[1] in _PROGRAMS)


def _has_server(command: Sequence[str]) -> bool:
    """Return whether this is a launch that may have a fork server."""
    if command[1:4] != ["-m", "headway", "launch"]:
        return False
    has_profile = "--dry-run" not in command and os.path.exists("headway.yaml")
    return has_profile or any(word.partition("=")[0] in _SUPERVISED for word in command)


def _serve_ranks(usual_modules: Collection[str]) -> None:
    """Run a fork server as Python runs its command, but for the import of torch."""
    _forget_modules(usual_modules)
    from headway.launcher.processes import server

    vars(server)["gc"] = SimpleNamespace(collect=bool, freeze=bool)  # it is done
    _run_to_end(server.main)


def main() -> None:
    """Serve; in a fork, run its command line."""
    _environ_of_fork.update(os.environ)
    import torch.distributed

    with warnings.catch_warnings():  # one of them sets filters
        import torch._dynamo
        import torch.distributed.checkpoint.state_dict

        with suppress(ImportError):  # what most examples import
            import sklearn.datasets
            import sklearn.model_selection  # noqa: F401
    tempfile.tempdir = None  # which they have asked for
    usual_modules = {*sys.modules}

    import torch.distributed.elastic.agent.server.api
    import torch.distributed.elastic.rendezvous

    assert torch
    gc.collect()
    gc.freeze()  # as a fork server does
    vars(gc)["unfreeze"] = bool  # a command does: the end of Python would look through torch
    _skip_destructors()
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    if _has_server(command) and reserve_server():
        _serve_ranks(usual_modules)
        return
    vars(os)["execve"] = _execute
    try:
        _run_to_end(_run, command)
    except _Executed as executed:
        kept = executed  # with what its frames hold
    _run_in_place(*kept.args, usual_modules)


if __name__ == "__main__":
    main()
