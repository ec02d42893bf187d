"""A launch on several hosts over ssh: one connection to each, one output, one report, one end.

At the other end of each connection is an agent, which runs `headway launch` on its host and ends it
when the connection does. Whatever happens to this process, nothing stays behind there.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple, TextIO, TypeVar

from headway.errors import HeadwayError, LaunchError, MachineError, Problem
from headway.launcher.remote.facts import differences, facts_here
from headway.launcher.remote.messages import (
    End,
    Facts,
    Order,
    Question,
    Route,
    Signal,
    Start,
    decode,
    encode,
)
from headway.settings.hosts import Hosts

Answer = TypeVar("Answer", Facts, Route)

_OPTIONS = {
    "BatchMode": "yes",  # no prompts: nobody could tell which host asks
    "ConnectTimeout": "15",
    "ServerAliveInterval": "5",  # a cut connection is noticed after 15 s
    "ServerAliveCountMax": "3",
}
_NOTICE_AFTER_S = 1.0
_READY_WITHIN_S = 120.0  # Python may start slowly from a network's file system
_CLOSE_WITHIN_S = 5.0  # for ssh to end after its agent
_FAILURE_KNOWN_S = 10.0  # from the failure of one launch to the end of the others
_MOST_HELD_BYTES = 1 << 16  # of an unfinished line
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAVED = 75
_LAUNCH_FAILED = LaunchError.exit_code


class RemoteLaunch(NamedTuple):
    """A launch on hosts.

    Args:
        hosts: in the order of their machine ranks.
        agent: the command that runs the agent, the same on each host.
        order: what each agent is told first; its mark is set here.
        words: returns the words of `headway launch` for a machine rank, and the address and the
            port of machine 0.
        main_address: of machine 0, where the user has set it.
        main_port: on machine 0, where the user has set it.
        stops_within_s: how long a launch may take to end after a stop signal.
    """

    hosts: Hosts
    agent: Sequence[str]
    order: Order
    words: Callable[[int, str, int], Sequence[str]]
    main_address: str | None
    main_port: int | None
    stops_within_s: float


def ssh_command(host: str, agent: Sequence[str]) -> list[str]:
    """Return the command that runs an agent on a host."""
    options = [f"-o{name}={value}" for name, value in _OPTIONS.items()]
    return ["ssh", "-T", *options, host, f"exec {shlex.join(agent)}"]


def run_on_hosts(launch: RemoteLaunch, here: Facts) -> int:
    """Run a launch on its hosts and return its exit code: that of the host that failed first.

    Args:
        launch: what to run, and where.
        here: the facts of this host, with which those of the others are compared.

    Raises:
        LaunchError: a host cannot be reached, or differs from this one; all such at once.
        MachineError: there is no ssh here.
    """
    return asyncio.run(_Run(launch).run(here))


def order_with_facts(order: Order, environ: Mapping[str, str]) -> tuple[Order, Facts]:
    """Return the order with a mark of its own, and the facts of this host."""
    order = order._replace(mark=secrets.token_hex(16))
    return order, facts_here(order, environ)


class _Run:
    """One launch on several hosts."""

    def __init__(self, launch: RemoteLaunch) -> None:
        self.launch = launch
        self.machines: list[_Connection] = []
        self.stopped_by = 0
        self.has_started = False

    async def run(self, here: Facts) -> int:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in _STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and shells' & set it
                loop.add_signal_handler(number, self._stop, number, task)
        try:
            for host in self.launch.hosts:
                self.machines.append(await _connect(host.name, self.launch))
            facts = await self._facts(here)
            await self._start(facts)
            return await self._end()
        except asyncio.CancelledError:  # a signal came before the start
            return 128 + self.stopped_by
        finally:
            for machine in self.machines:
                await machine.close(self.launch.stops_within_s)

    def _stop(self, number: int, task: asyncio.Task[int]) -> None:
        self.stopped_by = self.stopped_by or number
        if not self.has_started:
            task.cancel()
        for machine in self.machines if self.has_started else ():
            machine.send(encode(Signal(number)))

    async def _facts(self, here: Facts) -> list[Facts]:
        """Return what the agents say; all reasons why they cannot run the launch are one error."""
        notice = asyncio.create_task(self._say_who_is_waited_for())
        asked = [machine.ask(encode(self.launch.order), Facts) for machine in self.machines]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        notice.cancel()
        problems: list[Problem] = []
        for machine, answer in zip(self.machines, answers, strict=True):
            if isinstance(answer, HeadwayError):
                problems += answer.problems
            elif isinstance(answer, BaseException):
                raise answer
            else:
                problems += differences(machine.name, here, answer)
        if problems:
            raise LaunchError.of(problems)
        return [answer for answer in answers if isinstance(answer, Facts)]

    async def _say_who_is_waited_for(self) -> None:
        await asyncio.sleep(_NOTICE_AFTER_S)
        silent = [machine.name for machine in self.machines if not machine.has_answered]
        if silent:
            _say(f"waiting for {', '.join(silent)}")

    async def _start(self, facts: Sequence[Facts]) -> None:
        address = self.launch.main_address or await self._main_address(facts)
        port = self.launch.main_port or facts[0].port
        key = secrets.token_hex(32)
        self.has_started = True
        for rank, machine in enumerate(self.machines):
            words = self.launch.words(rank, address, port)
            machine.send(encode(Start(words, key, self.launch.stops_within_s)))

    async def _main_address(self, facts: Sequence[Facts]) -> str:
        """Return the address of machine 0: as ssh has reached it, or its route to the others.

        Where this process is on machine 0, ssh may have reached it through the loopback device,
        which no other machine can.
        """
        own = facts[0].address
        others = [fact.address for fact in facts[1:] if not _is_loopback(fact.address)]
        if not _is_loopback(own) or not others:
            return own
        route = await self.machines[0].ask(encode(Question(others[0])), Route)
        return route.address or own

    async def _end(self) -> int:
        """Wait for all launches; print the report of the one to blame, and return its code.

        Once one has failed, the others have some seconds to find that out by themselves.
        """
        ends: list[End] = []
        waiting = {asyncio.create_task(machine.end()): machine for machine in self.machines}
        while waiting:
            has_failed = any(end.exit_code not in (0, _SAVED) for end in ends)
            done, _ = await asyncio.wait(
                waiting,
                timeout=_FAILURE_KNOWN_S if has_failed else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            ends += [task.result() or waiting[task].lost() for task in done]
            is_lost = any(task.result() is None for task in done)
            for task in done:
                del waiting[task]
            for machine in waiting.values() if is_lost or not done else ():
                machine.close_input()
        blamed = min(ends, key=_blame)
        if blamed.report:
            print(blamed.report, file=sys.stderr, flush=True)
        return blamed.exit_code


def _blame(end: End) -> int:
    """Return how little an end explains the others: `min` finds the first of those that do most.

    A launch that could not go on because another machine failed has the code of launch errors.
    """
    if end.exit_code == 0:
        return 3
    if end.exit_code == _SAVED:
        return 2
    return int(end.exit_code == _LAUNCH_FAILED)


class _Connection:
    """The connection to an agent."""

    def __init__(self, name: str, process: Process, mark: str) -> None:
        self.name = name
        self.has_answered = False
        self._process = process
        self._mark = mark.encode()
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._held_errors: bytearray | None = bytearray()  # of ssh, until the agent answers
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self._take_output)),
            asyncio.create_task(self._read(process.stderr, self._take_error)),
        ]

    def send(self, line: bytes) -> None:
        """Send a line; where the connection is gone, `end` says so."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(line)

    async def ask(self, line: bytes, kind: type[Answer]) -> Answer:
        """Send a line, and return the agent's answer.

        Raises:
            LaunchError: none comes.
        """
        self.send(line)
        try:
            answer = await asyncio.wait_for(self._answers.get(), _READY_WITHIN_S)
        except asyncio.TimeoutError:
            raise self._unreachable("no answer") from None
        if answer is None:
            await asyncio.gather(*self._readers)
            lines = bytes(self._held_errors or b"").decode(errors="replace").strip().splitlines()
            raise self._unreachable(lines[-1] if lines else "the connection ended")
        self.has_answered = True
        self._show_held_errors()
        return decode(kind, answer)

    def _unreachable(self, reason: str) -> LaunchError:
        return LaunchError(
            f"nothing can be launched on {self.name}: {reason.strip()}",
            where=f"host {self.name}",
            fix=f"`ssh -oBatchMode=yes {self.name} {sys.executable} --version` has to work without "
            "a question, with the same Python there",
        )

    async def end(self) -> End | None:
        """Return how the launch has ended; None if the connection did before."""
        answer = await self._answers.get()
        return None if answer is None else decode(End, answer)

    def lost(self) -> End:
        """Return what is said of a host whose connection has ended."""
        error = LaunchError(
            f"the connection to {self.name} was lost",
            where=f"host {self.name}",
            fix="see the messages of ssh above; the launches on the other hosts were stopped",
        )
        return End(error.exit_code, f"error: {error}")

    def close_input(self) -> None:
        """Let the agent stop its launch."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def close(self, within_s: float) -> None:
        """End the connection, once the agent has ended its launch."""
        self.close_input()
        try:
            await asyncio.wait_for(self._process.wait(), within_s + _CLOSE_WITHIN_S)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()
        await asyncio.gather(*self._readers)

    async def _read(self, stream: asyncio.StreamReader, take: Callable[[bytes], None]) -> None:
        """Take whole lines, so that those of several hosts do not mix; and what is left."""
        rest = b""
        while data := await stream.read(_MOST_HELD_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                take(line + b"\n")
            if len(rest) > _MOST_HELD_BYTES:
                take(rest)
                rest = b""
        if rest:
            take(rest)
        if take == self._take_output:
            self._answers.put_nowait(None)

    def _take_output(self, line: bytes) -> None:
        shown, mark, answer = line.partition(self._mark)  # it may follow an unfinished line
        if shown:
            _write(sys.stdout, shown)
        if mark:
            self._answers.put_nowait(answer)

    def _take_error(self, line: bytes) -> None:
        if self._held_errors is None:
            _write(sys.stderr, line)
        else:
            self._held_errors += line

    def _show_held_errors(self) -> None:
        if self._held_errors:
            _write(sys.stderr, bytes(self._held_errors))
        self._held_errors = None


async def _connect(host: str, launch: RemoteLaunch) -> _Connection:
    command = ssh_command(host, launch.agent)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for this process, which passes it on
        )
    except FileNotFoundError:
        raise MachineError(
            "ssh was not found", where="PATH", fix="install OpenSSH's client"
        ) from None
    return _Connection(host, process, launch.order.mark)


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _write(stream: TextIO, data: bytes) -> None:
    stream.buffer.write(data)
    stream.buffer.flush()


def _say(text: str) -> None:
    print(f"headway: {text}", file=sys.stderr, flush=True)
