"""How the machines of one run go on together: each round, restart, stop and end of the channel."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from torch.distributed.elastic.rendezvous import RendezvousInfo

from headway.contract.notes import say
from headway.contract.step_clock import Figures
from headway.devices.table import kind_of
from headway.errors import HeadwayError
from headway.launcher.machines.connect import (
    interface_of,
    is_literally_local,
    listening_host,
    listening_socket,
    try_to_reach,
)
from headway.launcher.machines.coordinator import Seen, failure_of, loss
from headway.launcher.machines.member import Member
from headway.launcher.machines.membership import Membership
from headway.launcher.machines.messages import (
    Done,
    Failed,
    Missing,
    Probe,
    Probed,
    Ready,
    Restart,
    Round,
    Steps,
    Stopping,
)
from headway.launcher.machines.rendezvous import Rendezvous, RunEnded
from headway.launcher.machines.store import connect_to_store, open_store
from headway.launcher.plan.plan import LaunchPlan
from headway.launcher.plan.variables import LOOPBACK

_POLL_INTERVAL_S = 0.1
_JOIN_TIMEOUT_S = 600.0
_DECISION_WITHIN_S = 5.0  # of a machine 0 that is suspended, say
_STOP_AFTER_S = 1.0  # a scheduler signals every machine itself; a person signals one


class MachinesRendezvous(Rendezvous):
    """One machine's way through a run on several machines.

    Machine 0 has the hub of the channel, and all machines, itself included, are members. Each round
    has a store of its own for the ranks, on machine 0, at the address by which the channel reaches
    it.
    """

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str], run_id: str) -> None:
        super().__init__(run_id)
        self._membership = Membership(plan, environ, _JOIN_TIMEOUT_S)
        self.machine = plan.settings.machine_rank or 0
        self._device = plan.settings.device
        self._timeout_s = float(plan.settings.machine_timeout_s)
        self._probe: socket.socket | None = None  # another machine tries to reach it
        self._own_address = ""  # as other machines see it
        self._is_done = False
        self._stop_at: float | None = None
        self._has_stopped = False  # a signal has come here

    @property
    def restart(self) -> Restart | None:  # type: ignore[override]
        """The restart of all machines that has been asked for, and has not begun."""
        return self._member.restart if self._member is not None else None

    @property
    def _member(self) -> Member | None:
        return self._membership.member

    @property
    def _is_machine_0(self) -> bool:
        return self._membership.hub is not None

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and return when all machines have joined, or the run has ended."""
        member = self._member or self._join()
        self._look()
        self._store, self._is_done = None, False
        began, missing = member.round, member.missing
        store_port = None
        if self._is_machine_0:
            main = self._membership.address
            host = listening_host(main) if is_literally_local(main) else ""
            self._store, store_port = open_store(host)
        member.send(Ready(self._listen_to_probe(member), store_port))
        joined = self._wait_for_round(member, began, missing)
        self.round, self.machine, self._own_address = joined.number, joined.machine, joined.address
        if self._probe is not None:
            self._probe.close()
            self._probe = None
        self._membership.note_all_joined()
        address = self._store_address(member)
        if not self._is_machine_0:
            self._store = connect_to_store(address, joined.store_port, self._look)
        return self._info(joined.machine, joined.num_machines, address, joined.store_port)

    def _join(self) -> Member:
        member = self._membership.join(self.word, Seen(self.note_steps, self.note_loss))
        member.on_grace_end = self.end_grace_period
        return member

    def _listen_to_probe(self, member: Member) -> int:
        """Listen on the address that machine 0 sees this one at, for another machine to try."""
        if self._probe is None:
            self._probe = listening_socket("" if self._is_machine_0 else member.own_address, 0)
        port: int = self._probe.getsockname()[1]
        return port

    def _store_address(self, member: Member) -> str:
        if not self._is_machine_0:
            return member.address_of_machine_0
        main = self._membership.address
        return self._own_address or (main if is_literally_local(main) else LOOPBACK)

    def _wait_for_round(
        self, member: Member, began: Round | None, missing: Missing | None
    ) -> Round:
        """Return the round that follows `began`, once all machines are there.

        What is missing is printed where it was told after `missing`.
        """
        tried: Probe | None = None

        def has_news() -> bool:
            return member.round is not began or member.probe is not tried

        while True:
            if member.wait(has_news, _POLL_INTERVAL_S):
                if member.round is not None and member.round is not began:
                    return member.round
                tried = member.probe
                if tried is not None:
                    member.send(Probed(try_to_reach(tried)))
                continue
            self._look()
            if member.refused is not None:
                raise self._membership.not_taken_in()
            if member.missing is not missing and member.missing is not None:
                missing = member.missing
                say(f"waiting for {missing.text}")

    def _look(self) -> None:
        """Raise RunEnded if the run has ended elsewhere."""
        member = self._member
        if member is None:
            return
        if member.ended_by is not None:
            self.ended_by = member.ended_by
        elif member.is_lost and not member.is_all_done:
            self.has_lost_machine_0 = True
            self.ended_by = self._loss_of_machine_0(member)
        if self.ended_by is not None:
            raise RunEnded
        self._follow_stop(member)

    def _loss_of_machine_0(self, member: Member) -> Failed:
        address = self._membership.address
        reason = member.lost or str(member.unacceptable)
        return loss(f"machine 0 ({address})", 0, address, reason, "")

    def failed_elsewhere(self) -> Failed | None:
        member = self._member
        if member is None or member.is_all_done:
            return None
        return self._loss_of_machine_0(member) if member.is_silent else member.ended_by

    def _follow_stop(self, member: Member) -> None:
        """Stop as another machine has been stopped, unless the signal came here as well."""
        if member.stopping is None or self._has_stopped:
            return
        if self._stop_at is None:
            self._stop_at = time.monotonic() + _STOP_AFTER_S
        elif member.stopping.ends_grace or time.monotonic() > self._stop_at:
            number = signal.Signals(member.stopping.signal)
            say(f"stopped by {number.name} on {member.stopping.host}")
            signal.raise_signal(number)

    def num_nodes_waiting(self) -> int:
        self._look()
        return int(self.restart is not None)

    def restarts_after(self, describe: Callable[[], Failed]) -> bool:
        member = self._member
        assert member is not None
        told: Failed | None = None
        began = time.monotonic()
        while not member.wait(lambda: member.restart is not None, _POLL_INTERVAL_S):
            if member.stopping is not None:
                self._stop_at = 0.0  # the ranks here have failed because of it
                self._follow_stop(member)
            failed = describe()
            within_s = self._timeout_s * failed.doubt + _DECISION_WITHIN_S
            if member.is_over or time.monotonic() > began + within_s:
                break
            if told is None or (failed.cause, failed.doubt) != (told.cause, told.doubt):
                told = failed
                member.send(failed._replace(machine=self.machine, host=socket.gethostname()))
        with suppress(RunEnded):
            self._look()
        return self.restart is not None

    def are_all_done(self) -> bool:
        member = self._member
        assert member is not None
        if not self._is_done:
            self._is_done = True
            member.send(Done())
        return member.wait(lambda: member.is_all_done, _POLL_INTERVAL_S)

    def tell_stop(self, number: int, *, ends_grace: bool) -> None:
        member = self._member
        if member is not None and (ends_grace or not self._has_stopped):
            self._has_stopped = True
            if ends_grace or member.stopping is None:
                member.send(Stopping(int(number), socket.gethostname(), ends_grace))

    def tell_steps(self, rank: int, figures: Figures) -> None:
        member = self._member
        if member is not None and not self._is_machine_0 and not member.is_over:
            member.send(Steps(rank, figures))

    @property
    def is_awaited(self) -> bool:
        member = self._member
        knows_end = member is not None and (member.is_over or member.stopping is not None)
        return self.round < 0 and not knows_end

    def give_up(self, error: HeadwayError) -> None:
        member = self._member
        if member is not None and member.accepted is not None and self.ended_by is None:
            member.send(failure_of(error, self.machine))
            member.wait(lambda: False, _DECISION_WITHIN_S)

    def rank_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return which interface reaches the other machines, where the user has not said so."""
        member = self._member
        assert member is not None
        address = self._own_address if self._is_machine_0 else member.own_address
        interface = interface_of(address) if address else None
        if interface is None:
            return {}
        interfaces = kind_of(self._device).interfaces.items()
        return {name: exactly + interface for name, exactly in interfaces if name not in environ}

    def shutdown(self) -> bool:
        """Leave the run; machine 0 first waits until the others have, at most the grace period."""
        self._store = None
        if self._probe is not None:
            self._probe.close()
        self._membership.leave()
        return True
