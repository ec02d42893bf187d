"""On machine 0, decides when the ranks of a run start, restart and stop.

This module does no I/O: the inputs are messages and times, and the outputs are messages.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from headway.errors import HeadwayError, LaunchError
from headway.ipc.records import CrashSite, StepStats
from headway.ipc.stderr import ranges
from headway.launcher.multinode import messages, preflight
from headway.launcher.multinode.network import NOTICE_AFTER_S
from headway.settings.setting import Machines

SETTLE_S = 3.0  # wait for machines beyond the minimum
_MAX_SHOWN = 12  # differences between machines
_CAUSE_TIMEOUT_S = 2.0  # to find the cause of a failure that may be a consequence


class RankCallbacks(NamedTuple):
    """Callbacks on machine 0 for reports from other machines; the hub's thread calls them."""

    steps: Callable[[int, StepStats, int, str], object] = lambda *_: None  # machine, host last
    loss: Callable[[int], object] = lambda _: None  # the machine's rank
    failure: Callable[[CrashSite | None], str] = lambda _: ""  # describes the repetition


@dataclass(eq=False)
class MachineState:
    peer: int  # number of its connection
    join: messages.Join
    address: str  # as machine 0 sees it; empty for machine 0 itself
    reached_at: str  # the address of machine 0 to which it connected
    received_at: float  # monotonic time of its last message
    rank: int | None  # the requested rank, until one is assigned
    ready: messages.MachineReady | None = None  # while it waits for a round
    has_ranks: bool = False  # runs ranks in the current round
    is_checked: bool = False
    notes: tuple[str, ...] = ()  # unsent differences from machine 0
    is_done: bool = False
    is_leaving: bool = False
    progress: str = ""  # the last reported step of a rank
    failure: tuple[float, messages.Failed] | None = None  # time and failure in this round
    silent_exit: tuple[float, messages.Failed] | None = None  # of a rank that exited silently

    @property
    def label(self) -> str:
        return f"{_machine_label(self.rank)} ({self.join.host})"


def _machine_label(rank: int | None) -> str:
    return "a machine" if rank is None else f"machine {rank}"


def loss(label: str, machine: int, host: str, reason: str, progress: str) -> messages.Failed:
    advice = "to continue without lost machines, pass a range: --num-machines 1:2"
    if machine == 0:
        advice = "no other machine can replace machine 0"
    return messages.Failed(
        machine=machine,
        host=host,
        cause=f"{label} was lost: {reason}",
        where=f"the connection to {label}",
        details=f"last report of its ranks: {progress}" if progress else "",
        fix=f"check that machine, its network connection and its launcher's output; {advice}",
        exit_code=LaunchError.exit_code,
    )


def failure_of(error: HeadwayError, machine: int) -> messages.Failed:
    problem = error.problems[0]
    return messages.Failed(
        machine=machine,
        host=socket.gethostname(),
        cause=problem.title,
        where=problem.where,
        details="",
        fix=problem.fix,
        exit_code=error.exit_code,
        is_final=True,
    )


class Coordinator:
    """The state of a run on `least` to `most` machines.

    `facts` are machine 0's facts, with which every other machine's facts are compared. `log` prints
    a line on machine 0. All times are monotonic times of machine 0.
    """

    def __init__(
        self,
        *,
        least: int,
        most: int,
        max_restarts: int,
        join_timeout_s: float,
        machine_timeout_s: float,
        facts: messages.MachineFacts,
        log: Callable[[str], None],
        now: float,
    ) -> None:
        self.outbox: list[tuple[int, messages.Message]] = []
        self.callbacks = RankCallbacks()
        self.machines: dict[int, MachineState] = {}  # by peer
        self.is_ended = False
        self.num_unnotified = 0  # machines not notified of the run's end yet
        self.num_restarts = 0
        self._ended_by: messages.Failed | None = None
        self._least = least
        self._most = most
        self._max_restarts = max_restarts
        self._join_timeout_s = join_timeout_s
        self._facts = facts
        self._accepted = messages.Accepted(float(machine_timeout_s))
        self._log = log
        self._round = -1
        self._is_running = False
        self._is_stopping = False
        self._probes: dict[int, int] = {}  # probing peer -> probed peer
        self._problems: list[str] = []  # found by the probes
        self._settle_at = now
        self._failure_at: float | None = None  # time of a failure whose cause is unknown
        self._wait_until = now + join_timeout_s
        self._notice_at = now + NOTICE_AFTER_S
        self._are_notified = False  # whether machines know which machines are missing

    @property
    def is_busy(self) -> bool:
        """Whether `tick` must be called often."""
        return not (self.is_ended or (self._is_running and self._failure_at is None))

    def join(
        self, peer: int, join: messages.Join, address: str, reached_at: str, now: float
    ) -> bool:
        """Accept or refuse a machine; return whether it was accepted."""
        if self._ended_by is not None:
            self.num_unnotified -= self.num_unnotified > 0
            self.outbox.append((peer, self._ended_by))
            return False
        refused = self._rejection(join)
        if refused is not None:
            self.outbox.append((peer, refused))
            who = _machine_label(join.machine)
            self._log(f"refused {who} ({join.host}, {address}): {refused.what}")
            if (join.least, join.most) != (self._least, self._most):
                cause = f"{who} ({join.host}) was refused: {refused.what}"
                failed = self._failed(cause, refused.where, refused.fix)
                of_it = failed._replace(machine=join.machine or 0, host=join.host)
                self._end_before_start(of_it, num_known=1)
            return False
        self.machines[peer] = MachineState(peer, join, address, reached_at, now, join.machine)
        self.outbox.append((peer, self._accepted))
        return True

    def _rejection(self, join: messages.Join) -> messages.Rejected | None:
        if self.is_ended or self._is_stopping:
            again = "start the run again on all machines"
            return messages.Rejected("the run has ended", "machine 0", again)
        if (join.least, join.most) != (self._least, self._most):
            theirs, ours = Machines(join.most, join.least), Machines(self._most, self._least)
            return messages.Rejected(
                f"num_machines is {theirs} here, but {ours} on machine 0",
                f"{_machine_label(join.machine)}, and machine 0",
                "pass the same --num-machines on every machine",
            )
        what = ""
        fix = f"pass a different --machine-rank on every machine, from 0 to {self._most - 1}"
        asked = {machine.join.machine for machine in self.machines.values()}
        if join.machine is not None and join.machine in asked:
            what = f"machine_rank {join.machine} is set on two machines"
        elif join.machine is not None and join.machine >= self._most:
            what = f"machine_rank is {join.machine}, but the run has {self._most} machines"
        elif len(self.machines) == self._most:
            what = f"the run already has all of its {self._most} machines"
            fix = "increase --num-machines on every machine, or do not start this machine"
        return messages.Rejected(what, "the run at machine 0", fix) if what else None

    def handle(self, peer: int, message: messages.Message, now: float) -> None:
        machine = self.machines[peer]
        machine.received_at = now
        if isinstance(message, messages.StepTiming):
            machine.progress = f"rank {message.rank} at optimizer step {message.stats.step}"
            if machine.rank is not None:
                self.callbacks.steps(message.rank, message.stats, machine.rank, machine.join.host)
        elif isinstance(message, messages.MachineReady):
            machine.ready = message
            self._settle_at = now + SETTLE_S
            if self._is_running:
                missing = "the next restart, because the run has started"
                self._send([machine], messages.Missing(missing))
            elif self._are_notified and (missing := self._missing()):
                self._send([machine], messages.Missing(missing))
        elif isinstance(message, messages.Probed):
            self._note_probe(machine, message)
        elif isinstance(message, messages.Failed):
            self._note_failure(machine, message, now)
        elif isinstance(message, messages.Done):
            machine.is_done, left = True, message.silent_exit
            machine.silent_exit = (now - left.ago_s, left) if left else None
            self._check_all_done()
        elif isinstance(message, messages.Signalled):
            self._stop(machine, message)
        elif isinstance(message, messages.Leave):
            machine.is_leaving = self.is_ended or self._is_stopping or machine.is_done
        if isinstance(message, (messages.MachineReady, messages.Probed)):
            self._advance(now)

    def drop(self, peer: int, reason: str, now: float) -> None:
        machine = self.machines.pop(peer, None)
        if machine is None:
            return
        self._probes = {by: of for by, of in self._probes.items() if peer not in (by, of)}
        if self.is_ended or machine.is_leaving:
            return
        if machine.has_ranks and not machine.is_done and machine.rank is not None:
            self.callbacks.loss(machine.rank)
        lost = loss(machine.label, machine.rank or 0, machine.join.host, reason, machine.progress)
        if self._is_stopping:
            if machine.has_ranks:
                self._end(lost)  # in a save, other ranks may be waiting for its ranks
            return
        if machine.is_done:
            self._check_all_done()
        elif not machine.has_ranks:
            if machine.address:  # machine 0 reports its own exit
                self._log(f"{machine.label} left before its ranks started")
        elif self._least < self._most:
            self._log(f"{machine.label} was lost: {reason}")
            self._restart(f"{machine.label} was lost", is_counted=False, now=now)
        else:
            self._end(lost)
        self._advance(now)

    def tick(self, now: float) -> None:
        if self._failure_at is not None:
            self._judge(now)
        self._advance(now)
        if self._is_running or self.is_ended or not (missing := self._missing()):
            return
        if now > self._wait_until:
            cause = f"{missing} did not join within {self._join_timeout_s:.0f} s"
            fix = "start the same command on every machine"
            self._end(self._failed(cause, "machine 0", fix))
        elif now > self._notice_at and not self._are_notified:
            self._are_notified = True
            self._send(self.machines.values(), messages.Missing(missing))

    def _failed(self, cause: str, where: str, fix: str, details: str = "") -> messages.Failed:
        host = next((m.join.host for m in self.machines.values() if m.rank == 0), "")
        return messages.Failed(0, host, cause, where, details, fix, LaunchError.exit_code)

    def _send(self, machines: Iterable[MachineState], message: messages.Message) -> None:
        self.outbox += [(machine.peer, message) for machine in machines]

    def _missing(self) -> str:
        """Describe the machines that have not joined yet; empty if none is missing."""
        joined = {machine.rank for machine in self.machines.values()}
        if self._least < self._most or None in joined:
            num_missing = self._least - len(self.machines)
            return f"{num_missing} more machine{'s' * (num_missing > 1)}" if num_missing > 0 else ""
        missing = [rank for rank in range(self._most) if rank not in joined]
        return f"machine {ranges(missing)} of {self._most}" if missing else ""

    def _advance(self, now: float) -> None:
        """If the required machines are ready, check them or start a round."""
        if self._is_running or self.is_ended or self._is_stopping or self._probes:
            return
        ready = [machine for machine in self.machines.values() if machine.ready is not None]
        if any(machine.has_ranks and not machine.ready for machine in self.machines.values()):
            return
        if len(ready) < self._least or not any(machine.rank == 0 for machine in ready):
            return
        if len(ready) < self._most and now < self._settle_at:
            return
        self._assign_ranks(ready)
        if all(machine.is_checked for machine in ready):
            self._start_round(ready)
        else:
            self._check(ready)

    def _assign_ranks(self, machines: list[MachineState]) -> None:
        """Assign ranks to the machines in their previous order, with new machines last.

        If all machines have joined, each machine that requested a rank gets that rank.
        """
        kept = {machine.rank for machine in machines} if len(machines) == self._most else set()
        free = iter([rank for rank in range(len(machines)) if rank not in kept])
        machines.sort(key=lambda m: (self._most if m.rank is None else m.rank, m.peer))
        for m in machines:
            m.rank = m.rank if m.rank in kept - {None} else next(free)
        machines.sort(key=lambda m: m.rank or 0)

    def _check(self, machines: list[MachineState]) -> None:
        main, *others = machines
        found: list[tuple[str, str]] = []
        for machine in machines:
            machine.is_checked = True
        for other in others:
            ours, theirs = self._facts, other.join.facts
            found += preflight.differences(ours.must_agree, theirs.must_agree, other.label)
            for _, note in preflight.differences(
                ours.should_agree, theirs.should_agree, other.label
            ):
                self._log(f"note: {note}")
                other.notes += (note,)
        if found:
            self._refuse_all(
                f"the machines differ in {', '.join(dict.fromkeys(name for name, _ in found))}",
                "\n".join(sentence for _, sentence in found[:_MAX_SHOWN]),
                "use the same versions, settings and script on every machine",
            )
            return
        self._problems = []
        self._probes = {
            prober.peer: target.peer
            for prober, target in zip(machines, [*others, main], strict=True)
            if prober is not target
        }
        for by, of in self._probes.items():
            target, prober = self.machines[of], self.machines[by]
            assert target.ready is not None
            address = target.address or prober.reached_at
            probe = messages.Probe(target.label, address, target.ready.probe_port)
            self.outbox.append((by, probe))

    def _refuse_all(self, cause: str, details: str, fix: str) -> None:
        where = "compared before the ranks start"
        self._end(self._failed(cause, where, fix, details), details)

    def _note_probe(self, machine: MachineState, probed: messages.Probed) -> None:
        if machine.peer not in self._probes:
            return
        del self._probes[machine.peer]
        if probed.problem:
            self._problems.append(f"{machine.label}: {probed.problem}")
        if self._problems and not self._probes:
            loss = "if the network loses packets, repair it; otherwise, "
            self._refuse_all(
                f"{len(self._problems)} of the connections between the machines failed",
                "\n".join(self._problems),
                loss
                * (len(self._problems) < len(self.machines))  # some connections succeeded
                + "open the ports above 1023 between the machines, or set GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME to the interface that connects them",
            )

    def _start_round(self, machines: list[MachineState]) -> None:
        ready = [machine.ready for machine in machines if machine.ready is not None]
        store_port = ready[0].store_port or 0
        *first_ranks, world_size = accumulate((each.num_ranks for each in ready), initial=0)
        own_address = next((m.reached_at for m in machines[1:] if m.reached_at), "")
        self._round += 1
        self._is_running = True
        for rank, (m, first) in enumerate(zip(machines, first_ranks, strict=True)):
            m.ready = m.failure = m.silent_exit = None
            m.has_ranks, m.is_done = True, False
            address = m.address or own_address
            start = messages.StartRound(
                self._round, rank, len(machines), first, world_size, address, store_port, m.notes
            )
            m.notes = ()
            self.outbox.append((m.peer, start))

    def _note_failure(self, machine: MachineState, failed: messages.Failed, now: float) -> None:
        if failed.is_final:
            self._end_before_start(failed)
        if not (self._is_running and machine.has_ranks) or self.is_ended or self._is_stopping:
            return
        machine.failure = (now - failed.ago_s, failed)
        if self._failure_at is None:
            self._failure_at = now
            if failed.suspicion:
                self._send(self.machines.values(), messages.MachineHeartbeat())
        self._judge(now)

    def _judge(self, now: float) -> None:
        """Restart or end the run after a failure, once the reports on its cause have arrived."""
        assert self._failure_at is not None
        failures = [m.failure for m in self.machines.values() if m.failure is not None]
        if not failures:
            self._failure_at = None
            return
        failures += [m.silent_exit for m in self.machines.values() if m.silent_exit is not None]
        _, first = min(failures, key=lambda failure: (failure[1].suspicion, failure[0]))
        have_answered = all(m.received_at > self._failure_at for m in self.machines.values())
        if first.suspicion and (now < self._failure_at + _CAUSE_TIMEOUT_S or not have_answered):
            return
        self._failure_at = None
        first = first._replace(repeats=self.callbacks.failure(first.site))
        may_restart = not (first.repeats or first.is_final)
        if may_restart and self.num_restarts < self._max_restarts:
            self._restart(first.cause, is_counted=True, now=now)
        else:
            self._end(first)

    def _restart(self, cause: str, *, is_counted: bool, now: float) -> None:
        if not self._is_running:
            return
        self._is_running = False
        self._failure_at = None
        self.num_restarts += is_counted
        with_ranks = [machine for machine in self.machines.values() if machine.has_ranks]
        self._send(with_ranks, messages.Restart(cause, self.num_restarts if is_counted else 0))
        self._wait_until = now + self._join_timeout_s
        self._notice_at = now + NOTICE_AFTER_S
        self._are_notified = False

    def _end(self, failed: messages.Failed, details_for_all: str = "") -> None:
        """Notify all machines of the failure; machine 0 also gets the details, for its report."""
        self.is_ended = True
        self._ended_by = failed
        brief = failed._replace(details=details_for_all)
        for machine in self.machines.values():
            self.outbox.append((machine.peer, brief if machine.rank else failed))

    def _end_before_start(self, failed: messages.Failed, num_known: int = 0) -> None:
        """End a run before its ranks start; `num_known` other machines already know the reason."""
        has_all = self._is_running or self._least < self._most
        if not (has_all or self.is_ended or self._is_stopping):
            self.num_unnotified = max(self._most - len(self.machines) - num_known, 0)
            self._end(failed)

    def _stop(self, machine: MachineState, stopping: messages.Signalled) -> None:
        """Stop the run, unless a machine other than machine 0 stops before it runs ranks."""
        is_end = machine.has_ranks or not machine.address
        is_news = stopping.ends_grace or not self._is_stopping
        if is_end and is_news and not self.is_ended:
            self._is_stopping = True
            self._send([m for m in self.machines.values() if m is not machine], stopping)

    def _check_all_done(self) -> None:
        are_done = all(machine.is_done for machine in self.machines.values() if machine.has_ranks)
        if self._is_running and not self.is_ended and are_done:
            self.is_ended = True
            self._send(self.machines.values(), messages.AllDone())
