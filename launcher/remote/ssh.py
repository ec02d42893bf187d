"""Runs a launch on several hosts over ssh, with one connection per host and a single report.

An agent at the other end of each connection runs `headway launch` on its host. When the connection
is closed, the agent stops the launch. Nothing keeps running there, even if this process is killed.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from headway.errors import Code, HeadwayError, LaunchError, Problem
from headway.ipc.records import STOPPED_AND_SAVED
from headway.ipc.signals import STOP_SIGNALS
from headway.ipc.stderr import log
from headway.ipc.typed import encode
from headway.launcher.multinode.network import is_loopback
from headway.launcher.remote import agents
from headway.launcher.remote.agents import AgentLink
from headway.launcher.remote.protocol import AgentSetup, HostReply, LaunchEnd, Signal, StartLaunch
from headway.settings.setting import Hosts

_NOTICE_AFTER_S = 1.0  # before a wait for hosts is reported
_FAILURE_KNOWN_S = 10.0  # from a launch's failure until the other launches are stopped


class RemoteLaunch(NamedTuple):
    """A launch on several hosts.

    `words` is called with a machine rank and with machine 0's address and port. It returns the
    arguments of `headway launch` for that machine.
    """

    hosts: Hosts  # in order of machine rank
    agent: Sequence[str]  # the command that runs the agent, the same on each host
    setup: AgentSetup  # the first message to each agent
    words: Callable[[int, str, int], Sequence[str]]
    main_address: str | None  # of machine 0, if the user set it
    main_port: int | None
    stops_within_s: float  # deadline after a stop signal


def run_on_hosts(launch: RemoteLaunch) -> int:
    """Run a launch on its hosts and return its exit code, which is machine 0's if machine 0 fails.

    Raises a LaunchError that names all hosts that cannot be reached or cannot run the launch, and a
    MachineError if ssh is not installed here.
    """
    return asyncio.run(_Run(launch).run())


class _Run:
    def __init__(self, launch: RemoteLaunch) -> None:
        self.launch = launch
        self.machines: list[AgentLink] = []
        self.stopped_by = 0
        self.has_started = False
        self.is_closing = False

    async def run(self) -> int:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup or a shell's & sets SIG_IGN
                loop.add_signal_handler(number, self._stop, number, task)
        try:
            for host in self.launch.hosts:
                link = await agents.connect(host.name, self.launch.agent, self.launch.setup.mark)
                self.machines.append(link)
            found = await self._ask_hosts()
            await self._start(found)
            return await self._end()
        except asyncio.CancelledError:  # a signal arrived before the start
            log(f"stopped by {signal.Signals(self.stopped_by).name} before the launch had started")
            return 128 + self.stopped_by
        finally:
            await self._close()

    def _stop(self, number: int, task: asyncio.Task[int]) -> None:
        """Stop the launches, or exit if none has started; kill ssh if this command is exiting."""
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
        """Return the time allowed to close the connections; it is short before launches start."""
        return agents.CLOSE_WITHIN_S + (self.launch.stops_within_s if self.has_started else 0)

    async def _close(self) -> None:
        """Close all connections in parallel, once the agents have stopped their launches."""
        self.is_closing = True
        within_s = self._stops_within_s()
        for machine in self.machines:
            machine.close_input(within_s)
        text = f"to close the connection, at most {within_s:.0f} s; press Ctrl-C to close it now"
        async with self._waiting_notice(lambda machine: machine.is_open, text):
            await asyncio.gather(*(machine.wait_closed() for machine in self.machines))

    async def _ask_hosts(self) -> list[HostReply]:
        """Return the agents' answers; raises one LaunchError that lists all hosts' problems."""
        asked = [machine.ask(encode(self.launch.setup)) for machine in self.machines]
        async with self._waiting_notice(lambda machine: not machine.has_answered):
            answers = await asyncio.gather(*asked, return_exceptions=True)
        problems: list[Problem] = []
        for machine, answer in zip(self.machines, answers, strict=True):
            if isinstance(answer, HeadwayError):
                problems += answer.problems
            elif isinstance(answer, BaseException):
                raise answer
            elif answer.problem:
                what = f"cannot launch on {machine.name}: {answer.problem}"
                fix = "make the same folder and files available there, at the same paths"
                problems.append(Problem(what, f"host {machine.name}", fix, code=Code.SSH))
        if problems:
            raise LaunchError.of(problems)
        return [answer for answer in answers if isinstance(answer, HostReply)]

    @asynccontextmanager
    async def _waiting_notice(
        self, is_awaited: Callable[[AgentLink], bool], text: str = ""
    ) -> AsyncIterator[None]:
        def log_waiting() -> None:
            if names := [machine.name for machine in self.machines if is_awaited(machine)]:
                log(f"waiting for {', '.join(names)} {text}".rstrip())

        timer = asyncio.get_running_loop().call_later(_NOTICE_AFTER_S, log_waiting)
        try:
            yield
        finally:
            timer.cancel()

    async def _start(self, found: Sequence[HostReply]) -> None:
        address = self.launch.main_address or main_address_of(found)
        port = self.launch.main_port or found[0].port
        key = secrets.token_hex(32)
        self.has_started = True
        for rank, machine in enumerate(self.machines):
            words = self.launch.words(rank, address, port)
            machine.send(encode(StartLaunch(tuple(words), key, self.launch.stops_within_s)))

    async def _end(self) -> int:
        """Wait for all launches, print the report of the root cause and return its exit code.

        After a failure, the other launches have a few seconds to notice it. Then, or once a
        connection is lost, this command stops them and ignores their results.
        """
        ends: dict[int, LaunchEnd] = {}  # by machine rank, in order of arrival
        lost: list[LaunchEnd] = []
        are_stopped = False
        waiting = {asyncio.create_task(machine.end()): machine for machine in self.machines}
        while waiting:
            has_failed = any(map(_is_failure, ends.values()))
            done, _ = await asyncio.wait(
                waiting,
                timeout=_FAILURE_KNOWN_S if has_failed and not are_stopped else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            ended = {waiting.pop(task): task.result() for task in done}
            if not are_stopped or self.stopped_by:
                for machine, end in ended.items():
                    if end is None:
                        lost.append(machine.lost_end())
                    else:
                        ends[self.machines.index(machine)] = end
            if waiting and not are_stopped and (lost or not done):
                are_stopped = True
                self._stop_the_rest(waiting.values(), ended)
        cause = _root_cause(ends, lost, is_stopped=bool(self.stopped_by))
        if cause.report:
            print(cause.report, file=sys.stderr, flush=True)
        return cause.exit_code

    def _stop_the_rest(
        self, others: Collection[AgentLink], ended: Mapping[AgentLink, LaunchEnd | None]
    ) -> None:
        """Stop the launches that are still running after a failure; they then report SIGTERM."""
        gone = [machine.name for machine, end in ended.items() if end is None]
        why = f"the connection to {', '.join(gone)} was lost" if gone else "the run failed"
        log(f"{why}; stopping {', '.join(machine.name for machine in others)}")
        for machine in others:
            machine.close_input(self._stops_within_s())


def main_address_of(found: Sequence[HostReply]) -> str:
    """Return an address at which the other machines can reach machine 0.

    If this process is on machine 0, ssh may have used the loopback interface. In that case, return
    the address from which ssh's client reached the other hosts.
    """
    own = found[0].address
    seen = [ip for host in found[1:] if (ip := host.client_address) and not is_loopback(ip)]
    return seen[0] if seen and is_loopback(own) else own


def _root_cause(
    ends: Mapping[int, LaunchEnd], lost: Sequence[LaunchEnd], *, is_stopped: bool
) -> LaunchEnd:
    """Return the result to report: that of machine 0, which includes all machines' failures.

    If machine 0 did not fail, return the first lost connection or the first failure. `ends` are the
    results, by machine rank, that arrived before the other launches were stopped. If no stop signal
    was received, a SIGTERM in a launch was sent by the agent of a lost connection and is not the
    cause.
    """
    main = [ends[0]] if 0 in ends else []
    for end in (*main, *lost, *ends.values()):
        is_consequence = end.exit_code == 128 + signal.SIGTERM and bool(lost) and not is_stopped
        if _is_failure(end) and not is_consequence:
            return end
    return max(ends.values(), key=lambda end: end.exit_code)  # 0 if no launch had anything to save


def _is_failure(end: LaunchEnd) -> bool:
    return end.exit_code not in (0, STOPPED_AND_SAVED)
