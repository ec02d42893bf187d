"""Connects to agents on other hosts over ssh; connections are closed when this process exits."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from headway.errors import Code, LaunchError, MachineError
from headway.ipc.forking import die_with_parent
from headway.ipc.typed import decode
from headway.launcher.remote.protocol import HostReply, LaunchEnd

_OPTIONS = (
    "-oBatchMode=yes",  # no prompts, because a prompt would not name its host
    "-oConnectTimeout=15",
    "-oServerAliveInterval=5",  # a cut connection is noticed after 15 s
    "-oServerAliveCountMax=3",
)
_READY_WITHIN_S = 120.0  # Python may start slowly from a network file system
CLOSE_WITHIN_S = 5.0  # for ssh to exit after its agent
_REAPED_WITHIN_S = 1.0  # after SIGKILL
_MAX_LINE_BYTES = 1 << 16  # of an unfinished line
_MAX_REPLY_BYTES = 1 << 23  # an agent's LaunchEnd, with the report


class AgentLink:
    def __init__(self, name: str, process: Process, mark: str) -> None:
        self.name = name
        self.has_answered = False
        self._process = process
        self._mark = mark.encode()
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._held_errors: bytearray | None = bytearray()  # from ssh, until the agent answers
        self._killer: asyncio.TimerHandle | None = None
        self._is_killed = False
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self._handle_output)),
            asyncio.create_task(self._read(process.stderr, self._handle_error)),
        ]
        self._exit = asyncio.create_task(process.wait())

    @property
    def is_open(self) -> bool:
        return self._process.returncode is None

    def send(self, line: bytes) -> None:
        """Send a line; if the connection is lost, `end` returns None."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(line)

    async def ask(self, line: bytes) -> HostReply:
        """Send a line and return the agent's answer; raises LaunchError if there is none."""
        self.send(line)
        try:
            answer = await asyncio.wait_for(self._answers.get(), _READY_WITHIN_S)
        except asyncio.TimeoutError:
            raise self._unreachable("no answer") from None
        if answer is None:
            self.close_input(CLOSE_WITHIN_S)
            await self.wait_closed()
            lines = bytes(self._held_errors or b"").decode(errors="replace").strip().splitlines()
            raise self._unreachable(lines[-1] if lines else "the connection was closed")
        if self._held_errors:
            _write(sys.stderr, bytes(self._held_errors))
        self._held_errors = None
        found: HostReply = decode(HostReply, answer)
        return found

    def _unreachable(self, reason: str) -> LaunchError:
        return LaunchError(
            f"cannot launch on {self.name}: {reason.strip()}",
            where=f"host {self.name}",
            fix=f"`ssh -oBatchMode=yes {self.name} {sys.executable} --version` must work without "
            "a prompt, and print the same version as here",
            code=Code.SSH,
        )

    async def end(self) -> LaunchEnd | None:
        """Wait for the launch's result; return None if the connection is lost first."""
        answer = await self._answers.get()
        if answer is not None:
            end: LaunchEnd = decode(LaunchEnd, answer)
            return end
        self.close_input(CLOSE_WITHIN_S)
        await self.wait_closed()
        return None

    def lost_end(self) -> LaunchEnd:
        error = LaunchError(
            f"the connection to {self.name} was lost at {time.strftime('%H:%M:%S')}: "
            + self._exit_description(),
            where=f"host {self.name}",
            fix="see ssh's messages above; a host that lost its network connection stops its "
            "launch when the connection is back, or after about 15 minutes; do not relaunch "
            "before then",
            code=Code.SSH,
        )
        return LaunchEnd(error.exit_code, f"error: {error}")

    def _exit_description(self) -> str:
        code = self._process.returncode
        if self._is_killed or code is None:
            return "ssh did not exit before the deadline"
        if code < 0:
            return f"ssh was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"ssh exited with code {code}"

    def close_input(self, within_s: float) -> None:
        """Make the agent stop its launch; kill ssh if ssh is still running after `within_s`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.kill_after(within_s)

    def kill_after(self, seconds: float) -> None:
        """Kill ssh after a delay; this call replaces earlier calls."""
        if self._killer is not None:
            self._killer.cancel()
        self._killer = asyncio.get_running_loop().call_later(seconds, self.kill)

    def kill(self) -> None:
        """Kill ssh and its child processes on this machine, and discard their remaining output."""
        if self.is_open:
            self._is_killed = True
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        asyncio.get_running_loop().call_later(_REAPED_WITHIN_S, self._abandon)

    def _abandon(self) -> None:
        """Stop waiting, because a process that ssh leaves running may keep the pipes open."""
        for task in (*self._readers, self._exit):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until ssh has exited and all of its output is printed."""
        await asyncio.wait([*self._readers, self._exit])

    async def _read(self, stream: asyncio.StreamReader, handle: Callable[[bytes], None]) -> None:
        """Forward whole lines, so that hosts' lines do not mix; at EOF, also forward the rest."""
        rest = b""
        try:
            while data := await stream.read(_MAX_LINE_BYTES):
                if self._is_killed:
                    continue
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    handle(line + b"\n")
                held = _MAX_REPLY_BYTES if self._mark in rest else _MAX_LINE_BYTES
                if len(rest) > held:
                    handle(rest)
                    rest = b""
            if rest:
                handle(rest)
        finally:
            if handle == self._handle_output:
                self._answers.put_nowait(None)

    def _handle_output(self, line: bytes) -> None:
        shown, mark, answer = line.partition(self._mark)  # a mark may follow an unfinished line
        if shown:
            _write(sys.stdout, shown)
        if mark:
            self.has_answered = True
        if answer.strip():  # an empty answer only shows that the agent is running
            self._answers.put_nowait(answer)

    def _handle_error(self, line: bytes) -> None:
        if self._held_errors is None:
            _write(sys.stderr, line)
        else:
            self._held_errors += line
            del self._held_errors[:-_MAX_LINE_BYTES]


async def connect(host: str, agent: Sequence[str], mark: str) -> AgentLink:
    """Start ssh, which starts the agent on `host`, a name that ssh's configuration may define.

    `mark` precedes each answer of the agent in the host's output. Raises MachineError if ssh is not
    installed here, and LaunchError if ssh cannot be started.
    """
    here = os.getpid()
    try:
        process = await asyncio.create_subprocess_exec(
            *("ssh", "-T", *_OPTIONS, host, f"exec {shlex.join(agent)}"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,  # Ctrl-C goes to this process only, which forwards it
            preexec_fn=lambda: die_with_parent(here),
        )
    except FileNotFoundError:
        raise MachineError(
            "ssh was not found",
            where="PATH",
            fix="install the OpenSSH client",
            code=Code.NOT_INSTALLED,
        ) from None
    except OSError as error:
        raise LaunchError(
            f"cannot start ssh for {host}: {error.strerror}",
            where=f"host {host}",
            fix="raise `ulimit -u` and `ulimit -n`: each host needs a process and open files here",
            code=Code.SSH,
        ) from None
    return AgentLink(host, process, mark)


def _write(stream: TextIO, data: bytes) -> None:
    stream.buffer.write(data)
    stream.buffer.flush()
