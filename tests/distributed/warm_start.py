"""Starts Python programs from a process that has imported torch: a fraction of a launch's CPU time.

The warm process forks. What it starts has the parent, process group, streams, variables, working
directory, arguments and signal handlers of a program that is executed; of a launch, the ranks start
as always, from a fork server that is forked warm as well. What Python and torch settle when they
start is the warm process's: programs with other variables for them are executed, and so are those
with options of Popen that a fork cannot have.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import os
import runpy
import selectors
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headway.launcher.processes import server
from headway.launcher.rank.preloaded import READ_AT_IMPORT

_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "TORCH", *READ_AT_IMPORT)
_POSSIBLE = {"env", "cwd", "stdin", "stdout", "stderr", "text", "pass_fds", "start_new_session"}
_LONGEST = 2**17  # of a request
_MOST_FDS = 8
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # prctl(2)
_count = itertools.count()


class WarmPython:
    """A process with torch in memory that forks others.

    Args:
        environ: its variables; those that Python and torch read at their start hold for its forks.
        of_servers: has the fork servers of the launches that this one forks.
    """

    def __init__(self, environ: Mapping[str, str], of_servers: WarmPython | None = None) -> None:
        self.settled = _read_at_start(environ)
        self.address = f"headway-tests-{os.getpid()}-{next(_count)}"
        servers = [] if of_servers is None else [of_servers.address, json.dumps(of_servers.settled)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{self.address}")
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), *servers],
                env=environ,
                stdin=subprocess.PIPE,  # it ends with this process
                stdout=subprocess.DEVNULL,  # no terminal: stdout is buffered as in a pipe
                pass_fds=[listener.fileno()],
            )

    def close(self) -> None:
        with self._process:
            pass


class WarmPopen(subprocess.Popen[Any]):
    """A Popen whose process is forked by a warm Python.

    Overrides a private method, in which Popen's constructor does all that differs between systems.
    """

    def __init__(self, address: str, command: Sequence[str], **options: Any) -> None:
        self._address = address
        super().__init__(command, **options)

    def _execute_child(self, command: Sequence[str], *details: Any) -> None:
        pass_fds, cwd, env, pipes, is_leader = *details[3:6], details[9:15], details[20]
        streams = pipes[0], pipes[3], pipes[5]
        fds = {own: own if fd == -1 else fd for own, fd in enumerate(streams)}
        fds |= {fd: fd for fd in pass_fds}
        request = [[*command], os.path.abspath(cwd or ""), dict(env), [*fds], is_leader]
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link,
            _adopting_orphans(),
        ):
            link.connect(f"\0{self._address}")
            socket.send_fds(link, [json.dumps(request).encode()], [*fds.values()])
            self.pid = int(link.recv(_LONGEST))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def can_fork(settled: Mapping[str, str], options: Mapping[str, Any]) -> bool:
    """Return whether a fork of a process with these variables is the same as a Popen."""
    return options.keys() <= _POSSIBLE and _read_at_start(options["env"]) == settled


def serve(listener: socket.socket) -> list[str]:
    """Fork until standard input ends; return in a fork, with its command line."""
    selector = selectors.DefaultSelector()
    for one in (listener, sys.stdin):
        selector.register(one, selectors.EVENT_READ)
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        if sys.stdin in ready:
            os._exit(0)
        link, _ = listener.accept()
        request, fds, _, _ = socket.recv_fds(link, _LONGEST, _MOST_FDS)
        if request and _fork_orphan():
            link.sendall(str(os.getpid()).encode())
            for one in (link, listener, selector):
                one.close()
            command, cwd, env, own, is_leader = json.loads(request)
            _become(cwd, env, dict(zip(own, fds, strict=True)), is_leader)
            return [*command]
        for fd in (*fds, link.detach()):
            os.close(fd)


def _fork_orphan() -> bool:
    """Fork a process, which another adopts because its parent ends; return whether it is this."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():  # of OpenBLAS's idle threads, which survive a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        parent = os.fork()
        if parent == 0 and os.fork() != 0:
            os._exit(0)
    if parent != 0:
        os.waitpid(parent, 0)
    os.close(writing)
    if parent == 0:
        os.read(reading, 1)  # until the parent is gone and the warm process has closed its end
    os.close(reading)
    return parent == 0


def _become(cwd: str, env: Mapping[str, str], fds: Mapping[int, int], is_leader: bool) -> None:
    """Give this process a working directory, variables and descriptors."""
    # out of the way of the numbers that they get
    far = {own: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for own, fd in fds.items()}
    for fd in fds.values():
        os.close(fd)
    for own, fd in far.items():
        os.dup2(fd, own)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if is_leader:
        os.setsid()
    server._reopen_streams()


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make orphans among the descendants of this process its children. Source: prctl(2)."""
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _run(command: Sequence[str]) -> None:
    """Run a command line as Python does when it starts."""
    sys.orig_argv[:] = command
    for name in [name for name in sys.modules if f"{name}.".startswith("tests.")]:
        del sys.modules[name]
    while command[1].startswith("-u"):
        command = [command[0], *command[2:]]
    if command[1] == "-m":
        sys.argv = [*command[2:]]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    elif command[1] == "-c":
        sys.argv = [*command[1:2], *command[3:]]
        sys.path[0] = ""
        exec(command[2], vars(sys.modules["__main__"]))  # noqa: S102  the caller's own
    else:
        sys.argv = [*command[1:]]
        sys.path[0] = os.path.dirname(os.path.realpath(command[1]))
        runpy.run_path(command[1], run_name="__main__")


def main() -> None:
    """Serve; in a fork, run its command line."""
    listener, *servers = sys.argv[1:]
    server.warm_up()
    if servers:
        import torch.distributed.elastic.agent.server.local_elastic_agent
        import torch.distributed.elastic.rendezvous

        from headway.launcher.processes import starter

        assert torch
        address, settled = servers[0], json.loads(servers[1])

        def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
            if can_fork(settled, options):
                return WarmPopen(address, command, **options)
            return subprocess.Popen(command, **options)

        starter.start_process = start_process  # type: ignore[assignment]
    _run(serve(socket.socket(fileno=int(listener))))


if __name__ == "__main__":
    main()
