"""Starts real launches for tests, and looks at what they leave."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from tests.distributed.warm_start import WarmPopen, WarmPython
from tests.waiting import wait_until

HEADWAY = [sys.executable, "-m", "headway", "launch"]
IN_TERMINAL = "import fcntl, os, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
Done = subprocess.CompletedProcess[str]
on_linux = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="fork server, subreapers, /proc"),
]
"""The marks of a file whose launches need Linux."""
_warm_pythons: list[WarmPython] = []


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment, in which `headway` is found, and `variables`."""
    folders = [path for path in sys.path if path and not path.endswith("_vendor")]  # of setuptools
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **variables}


@contextmanager
def warm_python() -> Iterator[None]:
    """Have a process with torch in memory, which forks what is started."""
    is_linux = sys.platform == "linux"  # elsewhere no process can adopt another
    if not is_linux or find_spec("torch") is None:
        yield
        return
    python = WarmPython(environment())
    _warm_pythons.append(python)
    try:
        yield
    finally:
        _warm_pythons.remove(python)
        python.close()


def launch(
    *words: str,
    timeout_s: float = 300,
    typed: str | None = None,
    code: int | None = None,
    **variables: str,
) -> Done:
    """Run `headway launch` with these words, and this on its stdin, to its end with this code."""
    environ, command = environment(**variables), [*HEADWAY, *words]
    return run(command, environ, timeout_s=timeout_s, typed=typed, code=code)


def start(*words: str, first: str = "", **options: Any) -> subprocess.Popen[str]:
    """Begin `headway launch` with these words, in the place of a program that does this first."""
    before = f"{first}\nimport os, sys\nos.execve(sys.argv[1], sys.argv[1:], os.environ)"
    return begin([*([sys.executable, "-c", before] if first else []), *HEADWAY, *words], **options)


def begin(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Begin a program in environment(), whose stdout and stderr are pipes; see popen()."""
    usual = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return popen(command, text=True, **usual | options)


def start_in_terminal(
    *words: str, columns: int = 80, **variables: str
) -> tuple[subprocess.Popen[str], int]:
    """Begin `headway launch` in a terminal of its own, and return the terminal's other end."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(leader, (24, columns))
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    process = start(*words, first=IN_TERMINAL, env=environment(**variables), **streams)
    os.close(follower)
    return process, leader


def run(
    command: list[str],
    env: dict[str, str] | None = None,
    *,
    timeout_s: float = 120,
    cwd: Path | None = None,
    typed: str | None = None,
    stderr: int | IO[str] = subprocess.PIPE,
    code: int | None = None,
) -> Done:
    """Run a program, by default in environment(), to its end; Python is forked if it can be.

    Args:
        code: its exit code; None: any.
    """
    streams = {"stdout": subprocess.PIPE, "stderr": stderr}
    if typed is not None:
        streams["stdin"] = subprocess.PIPE
    with popen(command, env=env or environment(), cwd=cwd, text=True, **streams) as process:
        try:
            out, errors = process.communicate(typed, timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    assert code in (None, process.returncode), f"{process.returncode}: {out}{errors}"
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def execute(command: list[str], env: dict[str, str] | None = None, **options: Any) -> Done:
    """Run a program to its end; none is forked."""
    with executed():
        return run(command, env, **options)


def finished(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    """Return the stdout and stderr of a process that ends, with this code."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == code, f"{process.returncode}: {out}{errors}"
    return out, errors


def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a Python program, forked where that is the same; see warm_start.py."""
    for python in _warm_pythons:
        if python.can_start(command, options):
            return WarmPopen(python, command, **options)
    process: subprocess.Popen[str] = subprocess.Popen(command, **options)
    return process


@contextmanager
def executed() -> Iterator[None]:
    """Fork nothing that is started meanwhile."""
    usual = _warm_pythons[:]
    _warm_pythons.clear()
    try:
        yield
    finally:
        _warm_pythons[:] = usual


def free_port() -> int:
    """Return a port that nobody listens on, and that neither systems nor other tests give out."""
    for port in _ports():
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("no free ports")


@cache
def _ports() -> Iterator[int]:
    """Return this worker's ports, below those of connections; beginning where no other run does."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 16384 + worker % 16 * 1000
    return cycle(first + (os.getpid() + number) % 1000 for number in range(1000))


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie that nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(*pids: int) -> None:
    """Wait until none of these processes runs: signalled ones take their time to end."""
    wait_until(lambda: not any(map(is_alive, pids)))


def wait_for_pids(pattern: str, count: int) -> list[int]:
    """Return the numbers in so many files of the working directory, once they are in all."""
    texts: list[str] = []

    def are_told() -> bool:
        texts[:] = [path.read_text() for path in Path.cwd().glob(pattern)]
        return len(texts) == count and all(texts)

    wait_until(are_told)
    return [int(pid) for text in texts for pid in text.split()]


def script(text: str, name: str = "script.py") -> str:
    """Write a script into the working directory and return its name."""
    Path(name).write_text(text)
    return name
