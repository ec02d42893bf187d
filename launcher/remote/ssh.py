"""A launch on several hosts over ssh: one connection to each, one output, one report, one end.

At the other end of each connection is an agent, which runs `headway launch` on its host and ends it
when the connection does. Whatever happens to this process, nothing stays behind there.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from typing import NamedTuple, TextIO, TypeVar

from headway.errors import HeadwayError, LaunchError, MachineError, Problem
from headway.launcher.inside.process_cleanup import die_with_parent
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
_REAPED_WITHIN_S = 1.0  # after SIGKILL
_MOST_HELD_BYTES = 1 << 16  # of an unfinished line
_LONGEST_ANSWER_BYTES = 1 << 23  # of an agent: how its launch has ended, with the report
_MOST_BEFORE_READY_MIB = 1  # of output of a login shell, before the agent answers
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAVED = 75
_STOPPED = 128 + signal.SIGTERM
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
        self.is_closing = False

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
            _say(f"stopped by {signal.Signals(self.stopped_by).name} before anything had started")
            return 128 + self.stopped_by
        finally:
            await self._close()

    def _stop(self, number: int, task: asyncio.Task[int]) -> None:
        """Stop the launches; before there are any, this command; and at once if it ends already."""
        is_ending = self.is_closing or (self.stopped_by and not self.has_started)
        self.stopped_by = self.stopped_by or number
        if is_ending:
            for machine in self.machines:
                machine.kill()
        elif self.has_started:
            for machine in self.machines:
                machine.send(encode(Signal(number)))
                machine.kill_after(self._stops_within_s())
        else:
            task.cancel()

    def _stops_within_s(self) -> float:
        """Return how long connections may take to end: until they are made, nothing runs there."""
        return _CLOSE_WITHIN_S + (self.launch.stops_within_s if self.has_started else 0)

    async def _close(self) -> None:
        """End all connections at the same time, once the agents have ended their launches."""
        self.is_closing = True
        within_s = self._stops_within_s()
        for machine in self.machines:
            machine.close_input(within_s)
        text = f"to close the connection, {within_s:.0f} s at most; Ctrl-C ends it now"
        async with self._telling_who_is_waited_for(lambda machine: machine.is_open, text):
            await asyncio.gather(*(machine.ended() for machine in self.machines))

    async def _facts(self, here: Facts) -> list[Facts]:
        """Return what the agents say; all reasons why they cannot run the launch are one error."""
        asked = [machine.ask(encode(self.launch.order), Facts) for machine in self.machines]
        async with self._telling_who_is_waited_for(lambda machine: not machine.has_answered):
            answers = await asyncio.gather(*asked, return_exceptions=True)
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

    @asynccontextmanager
    async def _telling_who_is_waited_for(
        self, is_awaited: Callable[[_Connection], bool], text: str = ""
    ) -> AsyncIterator[None]:
        def tell() -> None:
            if names := [machine.name for machine in self.machines if is_awaited(machine)]:
                _say(f"waiting for {', '.join(names)} {text}".rstrip())

        timer = asyncio.get_running_loop().call_later(_NOTICE_AFTER_S, tell)
        try:
            yield
        finally:
            timer.cancel()

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

        Once one has failed, the others have some seconds to find that out by themselves; then, or
        once a connection is lost, this command stops them, and how they end explains nothing.
        """
        ends: list[End] = []
        lost: list[End] = []
        are_stopped = False
        waiting = {asyncio.create_task(machine.end()): machine for machine in self.machines}
        while waiting:
            has_failed = any(end.exit_code not in (0, _SAVED) for end in ends)
            done, _ = await asyncio.wait(
                waiting,
                timeout=_FAILURE_KNOWN_S if has_failed and not are_stopped else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            ended = {waiting.pop(task): task.result() for task in done}
            if not are_stopped or self.stopped_by:
                ends += [end for end in ended.values() if end is not None]
                lost += [machine.lost() for machine, end in ended.items() if end is None]
            if waiting and not are_stopped and (lost or not done):
                are_stopped = True
                self._stop_others(waiting.values(), ended)
        blamed = _to_blame(ends, lost, is_stopped=bool(self.stopped_by))
        if blamed.report:
            print(blamed.report, file=sys.stderr, flush=True)
        return blamed.exit_code

    def _stop_others(
        self, others: Collection[_Connection], ended: Mapping[_Connection, End | None]
    ) -> None:
        """Stop the launches that go on after a failure; they will say that SIGTERM came."""
        gone = [machine.name for machine, end in ended.items() if end is None]
        why = f"the connection to {', '.join(gone)} was lost" if gone else "the run has failed"
        _say(f"{why}; stopping {', '.join(machine.name for machine in others)}")
        for machine in others:
            machine.close_input(self._stops_within_s())


def _to_blame(ends: Sequence[End], lost: Sequence[End], *, is_stopped: bool) -> End:
    """Return the end that explains the others.

    Args:
        ends: of launches, in their order, until this command has stopped the others.
        lost: what is said of lost connections.
        is_stopped: a signal came to this command; otherwise the agent of a lost connection has
            sent the SIGTERM of which the launches on other hosts may have heard.
    """
    own = [end for end in ends if end.exit_code != _STOPPED or is_stopped or not lost]
    return min([*own, *lost], key=_explains_little)


def _explains_little(end: End) -> int:
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
        self._read_before_ready = 0
        self._killer: asyncio.TimerHandle | None = None
        self._is_killed = False
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self._take_output)),
            asyncio.create_task(self._read(process.stderr, self._take_error)),
        ]
        self._exit = asyncio.create_task(process.wait())

    @property
    def is_open(self) -> bool:
        return self._process.returncode is None

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
            self.close_input(_CLOSE_WITHIN_S)
            await self.ended()
            raise self._unreachable(self._why_it_ended())
        self._show_held_errors()
        return decode(kind, answer)

    def _why_it_ended(self) -> str:
        if self._says_too_much():
            return f"more than {_MOST_BEFORE_READY_MIB} MiB of output came from its login shell"
        lines = bytes(self._held_errors or b"").decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the connection ended"

    def _says_too_much(self) -> bool:
        return not self.has_answered and self._read_before_ready > _MOST_BEFORE_READY_MIB << 20

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
        if answer is not None:
            return decode(End, answer)
        self.close_input(_CLOSE_WITHIN_S)
        await self.ended()
        return None

    def lost(self) -> End:
        """Return what is said of a host whose connection has ended."""
        error = LaunchError(
            f"the connection to {self.name} was lost at {time.strftime('%H:%M:%S')}: "
            + self._how_it_ended(),
            where=f"host {self.name}",
            fix="see the messages of ssh above; the launches on the other hosts were stopped",
        )
        return End(error.exit_code, f"error: {error}")

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        if self._is_killed or code is None:
            return "it did not end in time"
        if code < 0:
            return f"ssh was ended by signal {-code} ({signal.strsignal(-code)})"
        return f"ssh ended with exit code {code}"

    def close_input(self, within_s: float) -> None:
        """Let the agent stop its launch; ssh is killed where it has not ended in time."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.kill_after(within_s)

    def kill_after(self, seconds: float) -> None:
        """Kill ssh in so many seconds; what was said before does not hold any more."""
        if self._killer is not None:
            self._killer.cancel()
        self._killer = asyncio.get_running_loop().call_later(seconds, self.kill)

    def kill(self) -> None:
        """End ssh, and what it has started here, at once; what they still say is left out."""
        if self.is_open:
            self._is_killed = True
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        asyncio.get_running_loop().call_later(_REAPED_WITHIN_S, self._abandon)

    def _abandon(self) -> None:
        """Wait no longer: what ssh has started for later connections may hold its pipes."""
        for task in (*self._readers, self._exit):
            task.cancel()

    async def ended(self) -> None:
        """Wait until ssh has ended, and all that it has written is shown."""
        await asyncio.wait([*self._readers, self._exit])

    async def _read(self, stream: asyncio.StreamReader, take: Callable[[bytes], None]) -> None:
        """Take whole lines, so that those of several hosts do not mix; and what is left."""
        rest = b""
        try:
            while data := await stream.read(_MOST_HELD_BYTES):
                if self._is_killed:
                    continue
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    take(line + b"\n")
                held = _LONGEST_ANSWER_BYTES if self._mark in rest else _MOST_HELD_BYTES
                if len(rest) > held:
                    take(rest)
                    rest = b""
                self._read_before_ready += len(data) * (not self.has_answered)
                if self._says_too_much():
                    self.kill()
            if rest:
                take(rest)
        finally:
            if take == self._take_output:
                self._answers.put_nowait(None)

    def _take_output(self, line: bytes) -> None:
        shown, mark, answer = line.partition(self._mark)  # it may follow an unfinished line
        if shown:
            _write(sys.stdout, shown)
        if mark:
            self.has_answered = True
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
    here = os.getpid()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for this process, which passes it on
            preexec_fn=lambda: die_with_parent(here),
        )
    except FileNotFoundError:
        raise MachineError(
            "ssh was not found", where="PATH", fix="install OpenSSH's client"
        ) from None
    except OSError as error:
        raise LaunchError(
            f"ssh cannot be started for {host}: {error.strerror}",
            where=f"host {host}",
            fix="each host takes a process and some open files here: see `ulimit -u` and -n",
        ) from None
    return _Connection(host, process, launch.order.mark)


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _write(stream: TextIO, data: bytes) -> None:
    stream.buffer.write(data)
    stream.buffer.flush()


def _say(text: str) -> None:
    print(f"headway: {text}", file=sys.stderr, flush=True)
