"""`headway stack PID`: print where all ranks of a running launch are."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise

import psutil

from headway.commands.flags import Parser
from headway.errors import ConfigError, LaunchError
from headway.launcher.reporting.watch import handles_quit, stack_pipe

_TIMEOUT_S = 10.0

PID = "PID: the process id of the launcher, or of a rank"


def main(argv: Sequence[str]) -> int:
    """Run `headway stack` with these words and return the exit code."""
    parser = Parser(
        "stack",
        "Print the stacks of all ranks of a running `headway launch`, and which rank is behind. "
        "The ranks keep running; a script that handles SIGQUIT itself gets that signal. "
        "Ctrl-\\ in the launcher's own terminal does the same.",
        usage="headway stack PID",
        appendix=f"\n{PID}\n",
    )
    _, words = parser.parse_words(argv)
    if len(words) != 1:
        parser.error(f"headway stack takes one process id, and got {len(words)} arguments")
    launcher = _launcher_of(_process(words[0]))
    with _answer_pipe(launcher.pid) as fd:
        os.kill(launcher.pid, signal.SIGQUIT)
        text = _read(fd, launcher)
    if not text:
        is_there = launcher.is_running()
        raise LaunchError(
            f"the launcher did not answer within {_TIMEOUT_S:.0f} s"
            if is_there
            else "the launcher ended before it answered",
            where=f"process {launcher.pid}",
            fix="look at its own output, where it prints the stacks too",
        )
    print(text, end="")
    return 0


def _process(text: str) -> psutil.Process:
    try:
        return psutil.Process(int(text))
    except (ValueError, psutil.NoSuchProcess):
        raise ConfigError(
            f"{text!r} is not the id of a running process",
            where="the command line",
            fix="`pgrep -af headway` lists launchers",
        ) from None


def _launcher_of(process: psutil.Process) -> psutil.Process:
    """Return the launcher: `process` itself, one of its parents, or the only one below it."""
    for one in (process, *process.parents()):
        if _is_running_launch(one):
            return one
    # below init are the launches of all users
    below = process.children(recursive=True) if process.pid != 1 else []
    launchers = [one for one in below if _is_running_launch(one)]
    if len(launchers) == 1:
        return launchers[0]
    if launchers:
        raise LaunchError(
            f"process {process.pid} has {len(launchers)} launches below it",
            where="the command line",
            fix=f"pass the id of one: {', '.join(str(one.pid) for one in launchers)}",
        )
    raise LaunchError(
        f"process {process.pid} belongs to no launch that would show stacks on SIGQUIT",
        where=f"its name is {process.name()!r}; a single process that was not started with "
        "--supervise has no launcher",
        fix="pass the id of the launcher or of a rank of a running `headway launch`",
    )


def _is_running_launch(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return _is_launch(process.cmdline()) and handles_quit(process.pid)
    return False


def _is_launch(command: Sequence[str]) -> bool:
    names = [os.path.basename(word) for word in command]
    if not names or not names[0].startswith(("python", "headway")):  # such as timeout
        return False
    pairs = pairwise(names)
    return any(pair in (("headway", "launch"), ("headway.exe", "launch")) for pair in pairs)


@contextmanager
def _answer_pipe(pid: int) -> Iterator[int]:
    """Make the pipe that the launcher writes its answer into, and remove it afterwards."""
    path = stack_pipe(pid)
    folder = os.path.dirname(path)
    deadline = time.monotonic() + _TIMEOUT_S
    while os.path.exists(folder) and time.monotonic() < deadline:
        time.sleep(0.1)  # another `headway stack` is asking
    try:
        os.mkdir(folder, mode=0o700)
        os.mkfifo(path, mode=0o600)
    except OSError as error:
        raise LaunchError(
            f"cannot create {folder}: {error.strerror}",
            where="the directory for temporary files",
            fix=f"if no other `headway stack {pid}` runs, remove {folder}",
        ) from None
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)
        os.unlink(path)
        os.rmdir(folder)


def _read(fd: int, writer: psutil.Process) -> str:
    """Return what `writer` writes into the pipe, up to its end."""
    data = b""
    deadline = time.monotonic() + _TIMEOUT_S
    while (left_s := deadline - time.monotonic()) > 0 and writer.is_running():
        select.select([fd], [], [], left_s)
        with suppress(BlockingIOError):
            part = os.read(fd, 65536)
            if not part and data:
                break
            data += part
        time.sleep(0.01)  # until the writer opens the pipe, reads return its end
    return data.decode(errors="replace")
