"""Starts Python programs from a process that has imported torch: half the CPU time of a launch.

The warm process forks. What it starts has the parent, process group, streams, variables, working
directory, arguments and signal handlers of a program that is executed; of a launch, the fork server
and the ranks start as always. What Python and torch settle when they start is the warm process's:
programs with other variables for them are executed, and so are those with options of Popen that a
fork cannot have.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headway.launcher.processes.server import _reopen_streams
from headway.launcher.rank.preloaded import READ_AT_IMPORT

_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "TORCH", *READ_AT_IMPORT)
_POSSIBLE = {"env", "cwd", "stdin", "stdout", "stderr", "text"}  # options of Popen
_LONGEST = 2**17  # of a request
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class WarmPython:
    """A process with torch in memory that forks others.

    Args:
        environ: its variables; those that Python and torch read at their start hold for its forks.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._settled = _read_at_start(environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # no terminal: stdout is buffered as in a pipe
                pass_fds=[theirs.fileno()],
            )

    def can_start(self, options: Mapping[str, Any]) -> bool:
        """Return whether a fork is the same as a Popen with these options."""
        is_possible = options.keys() <= _POSSIBLE
        return is_possible and _read_at_start(options["env"]) == self._settled

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


def _become(cwd: str, env: Mapping[str, str], fds: Sequence[int]) -> None:
    """Give this process a working directory, variables and streams."""
    for own, fd in enumerate(fds):
        os.dup2(fd, own)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    _reopen_streams()


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}


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
    is_module = command[1] == "-m"
    sys.argv = [*command[2 if is_module else 1 :]]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(command[1]))
        runpy.run_path(command[1], run_name="__main__")


def main() -> None:
    """Serve; in a fork, run its command line."""
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.elastic.rendezvous

    assert torch
    _run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
