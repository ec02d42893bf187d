"""How a machine joins a run of several: as machine 0, which has the hub, or over a connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

import torch

from headway.contract.notes import say
from headway.errors import LaunchError
from headway.launcher.clusters.slurm import SLURM, address_of_node
from headway.launcher.machines.connect import (
    allow_open_files,
    connect_to,
    host_port,
    is_machine_0,
    listen_as_machine_0,
)
from headway.launcher.machines.coordinator import Coordinator, Seen
from headway.launcher.machines.hub import Hub
from headway.launcher.machines.member import Member
from headway.launcher.machines.messages import Join, Leave
from headway.launcher.machines.preflight import facts_of
from headway.launcher.machines.run_key import (
    HOW_TO_SET,
    RunKey,
    run_key_of_machine_0,
    wait_for_run_key,
)
from headway.launcher.plan.plan import LaunchPlan

_POLL_INTERVAL_S = 0.1
_NOTICE_AFTER_S = 1.0
_RETRY_S = 0.5
_ANSWERS_WITHIN_S = 60.0  # machine 0 does at once, unless it is suspended


class Membership:
    """This machine's part in the channel: a member, and on machine 0 the hub.

    Machine 0, and machines that are missing, are waited for `join_timeout_s` seconds.
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
        self._main = host_port(self.address, self.port)
        self._this = "this machine" if self._rank is None else f"machine {self._rank}"

    def join(self, word: Callable[[], str], seen: Seen | None = None) -> Member:
        """Return this machine's member, once machine 0 has taken it in or told how the run ended.

        `word` returns how far the ranks of this machine are; `seen` is told of those of others, on
        machine 0. Raises LaunchError where machine 0 cannot be reached, the port is in use, or the
        machine is refused.
        """
        link = self._listen(seen or Seen()) if is_machine_0(self._rank, self.address) else None
        member = self._reach(word) if link is None else self._offer(link, word)
        if member.accepted is not None and member.accepted.digest != self._facts.digest():
            member.send(self._facts)
        return member

    def _reach(self, word: Callable[[], str]) -> Member:
        """Return the member, once machine 0's name resolves, and it listens there and answers.

        A closed connection is made again: a tunnel or load balancer closes it before machine 0
        listens behind it, and machine 0 does where too many strangers connect.
        """
        until = time.monotonic() + self._join_timeout_s
        notice_at = time.monotonic() + _NOTICE_AFTER_S
        noticed = set[bool]()  # both kinds of waiting are
        host = ""  # another address of machine 0, for an unknown name
        while True:
            is_closed = False
            try:
                link = connect_to(host or self.address, self.port)
            except UnicodeError as error:
                raise self._cannot_reach(f"it is no host name: {error}") from None
            except OSError as error:
                reason = error.strerror or str(error)
                if isinstance(error, socket.gaierror) and not host:
                    host = self._look_up(self.address) or self.address
            else:
                self._key = wait_for_run_key(self._environ)
                member = self._offer(link, word)
                if not member.is_closed_unanswered:
                    return member
                member.close()
                is_closed, reason = True, "what listens there closes the connection"
            if time.monotonic() > until:
                raise self._cannot_reach(reason)
            if time.monotonic() > notice_at and is_closed not in noticed:
                noticed.add(is_closed)
                say(f"waiting for machine 0 at {self._main} ({reason})")
            time.sleep(_RETRY_S if is_closed else _POLL_INTERVAL_S)

    def _cannot_reach(self, reason: str) -> LaunchError:
        return LaunchError(
            f"{self._this} cannot reach machine 0 at {self._main}: {reason}",
            where=self._place,
            fix="start the run on machine 0, and open that port in its firewall; --main-address is "
            "a name or IP address of machine 0 that all machines know",
        )

    def _offer(self, link: socket.socket, word: Callable[[], str]) -> Member:
        """Return the member on a connection that has an answer, or was closed without one."""
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
                raise self._not_machine_0("has not answered")
            if time.monotonic() > notice_at:
                notice_at = until
                say(
                    f"waiting for machine 0 at {self._main}: something listens there, but has not "
                    "answered yet"
                )
        return member

    def not_taken_in(self) -> LaunchError:
        """Return the error for this machine, which machine 0 has not taken in."""
        assert self.member is not None
        refused, unacceptable = self.member.refused, self.member.unacceptable
        if refused is not None:
            return LaunchError(refused.what, where=refused.where, fix=refused.fix)
        if unacceptable is None or not unacceptable.reason:
            return self._not_machine_0(str(unacceptable or "has closed the connection"))
        if unacceptable.reason == "version":
            return LaunchError(
                f"machine 0 at {self._main} runs another version of Headway",
                where=self._this,
                fix="install the same version on every machine",
            )
        return LaunchError(
            f"machine 0 at {self._main} does not know the key of {self._this}",
            where=f"the run's key here: {self._key.origin if self._key is not None else 'none'}",
            fix=f"another run may listen there: pass another --main-port; or {HOW_TO_SET}",
        )

    def _not_machine_0(self, what: str) -> LaunchError:
        return LaunchError(
            f"what listens at {self._main} is not machine 0 of a run: {what}",
            where=self._place,
            fix="start the run on machine 0, or, if another program uses that port there, pass "
            "another --main-port on every machine",
        )

    @property
    def _place(self) -> str:
        return f"main_address {self.address}, main_port {self.port}"

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
