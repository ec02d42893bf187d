"""How a machine joins a run of several: as machine 0, which has the hub, or over a connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

import torch

from headway.contract.notes import say
from headway.errors import LaunchError
from headway.launcher.clusters.slurm import SLURM, address_of_node
from headway.launcher.machines.addresses import host_port
from headway.launcher.machines.connect import (
    allow_open_files,
    cannot_reach,
    connect,
    is_machine_0,
    listen_as_machine_0,
    not_machine_0,
    not_taken_in,
)
from headway.launcher.machines.coordinator import Coordinator
from headway.launcher.machines.hub import Hub
from headway.launcher.machines.machine_state import UNSEEN, Seen
from headway.launcher.machines.member import Member
from headway.launcher.machines.messages import Join, Leave
from headway.launcher.machines.preflight import facts_of
from headway.launcher.machines.run_key import (
    RunKey,
    run_key_of_machine_0,
    wait_for_run_key,
)
from headway.launcher.plan.plan import LaunchPlan

_POLL_INTERVAL_S = 0.1
_NOTICE_AFTER_S = 1.0
_RETRY_S = 0.5
_CLOSED = "what listens there closes the connection"
_ANSWERS_WITHIN_S = 60.0  # machine 0 does at once, unless it is suspended


class Membership:
    """This machine's part in the channel: a member, and on machine 0 the hub.

    Args:
        plan: the launch; its `main_address` and `main_port` are where machine 0 listens.
        environ: the launcher's, which may hold the run's key.
        join_timeout_s: how long to wait for machine 0 and for missing machines.
    """

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str], join_timeout_s: float) -> None:
        settings = plan.settings
        assert settings.main_address is not None, "the plan has been checked"
        assert settings.main_port is not None
        self.address: str = settings.main_address
        self.port: int = settings.main_port
        self.member: Member | None = None
        self.hub: Hub | None = None
        self._settings = settings
        self._facts = facts_of(plan, torch.__version__)
        self._environ = environ
        self._least, self._most = settings.num_machines.least, int(settings.num_machines)
        self._rank: int | None = settings.machine_rank
        self._join_timeout_s = join_timeout_s
        self._timeout_s = float(settings.machine_timeout_s)
        self._key: RunKey | None = None

    def join(self, word: Callable[[], str], seen: Seen = UNSEEN) -> Member:
        """Return this machine's member, once machine 0 has taken it in or told how the run ended.

        Args:
            word: returns how far the ranks of this machine are.
            seen: on machine 0, who is told of the ranks of others.

        Raises:
            LaunchError: machine 0 cannot be reached, the port is in use, the machine is refused.
        """
        link = self._listen(seen) if is_machine_0(self._rank, self.address) else None
        member = self._reach(word) if link is None else self._offer(link, word)
        if member.accepted is not None and member.accepted.digest != self._facts.digest():
            member.send(self._facts)
        return member

    def _reach(self, word: Callable[[], str]) -> Member:
        """Return the member, once machine 0 has answered: a closed connection is made again.

        A tunnel or load balancer closes it before machine 0 listens behind it, and machine 0 does
        where too many strangers connect.
        """
        until = time.monotonic() + self._join_timeout_s
        notice_at = time.monotonic() + _NOTICE_AFTER_S
        while True:
            left_s = max(until - time.monotonic(), 0.0)
            link = connect(self.address, self.port, self._this, left_s, self._look_up)
            self._key = wait_for_run_key(self._environ)
            member = self._offer(link, word)
            if not member.is_closed_unanswered:
                return member
            member.close()
            if time.monotonic() > until:
                raise cannot_reach(self.address, self.port, self._this, _CLOSED)
            if time.monotonic() > notice_at:
                main = host_port(self.address, self.port)
                say(f"waiting for machine 0 at {main} ({_CLOSED})")
                notice_at = until
            time.sleep(_RETRY_S)

    def _offer(self, link: socket.socket, word: Callable[[], str]) -> Member:
        """Return the member on a connection, once it has an answer, or has been closed without one.

        Raises:
            LaunchError: the answer is not that of machine 0, or the machine is refused.
        """
        assert self._key is not None
        member = self.member = Member(link, self._key.key, self._timeout_s, word)
        member.send(self._introduction())
        notice_at = time.monotonic() + _NOTICE_AFTER_S
        until = time.monotonic() + min(self._join_timeout_s, _ANSWERS_WITHIN_S)
        while not member.wait(lambda: member.accepted is not None, _POLL_INTERVAL_S):
            if member.ended_by is not None or member.is_closed_unanswered:
                return member
            if member.is_over:
                raise self.not_taken_in()
            if time.monotonic() > until:
                raise not_machine_0(self.address, self.port, "has not answered")
            if time.monotonic() > notice_at:
                notice_at = until
                main = host_port(self.address, self.port)
                say(
                    f"waiting for machine 0 at {main}: something listens there, but has not "
                    "answered yet"
                )
        return member

    def not_taken_in(self) -> LaunchError:
        """Return the error for this machine, which machine 0 has not taken in."""
        assert self.member is not None
        origin = self._key.origin if self._key is not None else "none"
        return not_taken_in(self.member, self.address, self.port, self._this, origin)

    def note_all_joined(self) -> None:
        """Remove the file with the run's key where nobody can join any more."""
        if self._key is not None and self._least == self._most:
            self._key.forget()

    def leave(self) -> None:
        """Leave the run; machine 0 first waits until the others have, at most the grace period."""
        if self.member is not None:
            self.member.send(Leave())
            self.member.close()
        if self.hub is not None:
            self.hub.close(self._settings.grace_period_s)
        if self._key is not None:
            self._key.forget()

    def _introduction(self) -> Join:
        return Join(
            machine=0 if self.hub is not None else self._rank,
            least=self._least,
            most=self._most,
            host=socket.gethostname(),
            num_processes=self._settings.num_processes,
            clock=time.time(),
        )

    def _listen(self, seen: Seen) -> socket.socket | None:
        """Become machine 0 and return its own connection; None: another on this host is it."""
        try:
            listener = listen_as_machine_0(self.address, self.port)
        except LaunchError:
            if self._rank is None:
                return None
            raise
        self._key = run_key_of_machine_0(self._environ, say)
        coordinator = Coordinator(
            least=self._least,
            most=self._most,
            max_restarts=self._settings.max_restarts,
            join_timeout_s=self._join_timeout_s,
            machine_timeout_s=self._timeout_s,
            facts=self._facts,
            say=say,
            now=time.monotonic(),
        )
        coordinator.seen = seen
        allow_open_files(self._most)
        self.hub = Hub(listener, self._key.key, coordinator, self._timeout_s, say)
        return self.hub.take_own_end()

    def _look_up(self, name: str) -> str | None:
        return address_of_node(name) if self._settings.cluster == SLURM.name else None

    @property
    def _this(self) -> str:
        return "this machine" if self._rank is None else f"machine {self._rank}"
