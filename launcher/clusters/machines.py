"""How the machines of one run meet, and how they stay together: by the channel to machine 0."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from headway.errors import LaunchError
from headway.launcher.clusters.channel.coordinator import Coordinator
from headway.launcher.clusters.channel.hub import Hub
from headway.launcher.clusters.channel.joined import loss
from headway.launcher.clusters.channel.member import Member
from headway.launcher.clusters.channel.messages import (
    Bye,
    Done,
    Failed,
    Join,
    Probe,
    Probed,
    Ready,
    Restart,
    Round,
    Stopping,
)
from headway.launcher.clusters.channel.preflight import facts_of
from headway.launcher.clusters.channel.run_key import (
    RunKey,
    run_key_of_machine_0,
    run_key_of_other,
)
from headway.launcher.clusters.interfaces import (
    interface_of,
    is_here,
    is_literally_local,
    resolved,
)
from headway.launcher.clusters.reaching import (
    allow_open_files,
    connect,
    listening_host,
    not_machine_0,
    not_taken_in,
    try_to_reach,
)
from headway.launcher.clusters.rendezvous import (
    Rendezvous,
    RunEnded,
    listening_socket,
    no_answer,
    own_store,
    print_notice,
)
from headway.launcher.clusters.store_calls import begin, is_done
from headway.launcher.planning.plan import LOOPBACK, LaunchPlan
from headway.launcher.reporting.rank_channel import say

JOIN_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.1
_NOTICE_AFTER_S = 1.0
_STORE_TIMEOUT_S = 60.0
_KEY_FILE_WITHIN_S = 30.0  # on a network file system
_DECISION_WITHIN_S = 5.0  # of a machine 0 that is suspended, say
_STOP_AFTER_S = 1.0  # a scheduler signals every machine itself; a person signals one


class MachinesRendezvous(Rendezvous):
    """One machine's membership in a run on several machines.

    Machine 0 has the hub of the channel, and all machines, itself included, are members. Each round
    has a store of its own for the ranks, on machine 0, at the address by which the channel reaches
    it.

    Args:
        plan: the launch; its `main_address` and `main_port` are where machine 0 listens.
        environ: the launcher's, which may hold the run's key.
        run_id: passed on to the ranks.
        join_timeout_s: how long to wait for machine 0 and for missing machines.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        environ: Mapping[str, str],
        run_id: str,
        join_timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        super().__init__(run_id)
        settings = plan.settings
        assert settings.main_address is not None, "the plan has been checked"
        assert settings.main_port is not None
        self.address: str = settings.main_address
        self.port: int = settings.main_port
        self._plan = plan
        self._facts = facts_of(plan, torch.__version__)
        self._environ = environ
        self._least, self._most = settings.num_machines.least, int(settings.num_machines)
        self._asked_rank: int | None = settings.machine_rank
        self.machine = settings.machine_rank or 0
        self._join_timeout_s = join_timeout_s
        self._timeout_s = float(settings.machine_timeout_s)
        self._hub: Hub | None = None
        self._member: Member | None = None
        self._key: RunKey | None = None
        self._probe: socket.socket | None = None  # another machine tries to reach it
        self._own_address = ""  # as other machines see it
        self._is_done = False
        self._stop_at: float | None = None
        self._has_stopped = False  # a signal has come here

    @property
    def restart(self) -> Restart | None:  # type: ignore[override]
        """The restart of all machines that has been asked for, and has not begun."""
        return self._member.restart if self._member is not None else None

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and return when all machines have joined.

        Raises:
            LaunchError: machine 0 cannot be reached, the port is in use, the machine is refused.
            RunEnded: another machine has ended the run.
        """
        if self._member is None:
            self._member = self._join()
        self._store, self._is_done = None, False
        began = self._member.round
        store_port = self._open_store() if self._hub is not None else None
        self._member.send(Ready(self._listen_to_probe(), store_port))
        joined = self._wait_for_round(began)
        self.round, self.machine, self._own_address = joined.number, joined.machine, joined.address
        if self._probe is not None:
            self._probe.close()
            self._probe = None
        if self._key is not None and self._least == self._most:
            self._key.forget()
        address = self._store_address
        if self._hub is None:
            self._store = self._connect_to_store(address, joined.store_port)
        return self._info(joined.machine, joined.num_machines, address, joined.store_port)

    def _join(self) -> Member:
        link = self._listen() if self._is_machine_0() else None
        if link is None:
            link = connect(self.address, self.port, self._this, self._join_timeout_s)
            self._key = self._read_key()
        assert self._key is not None
        member = self._member = Member(link, self._key.key, self._timeout_s, lambda: self.word())
        member.send(self._introduction())
        notice_at = time.monotonic() + _NOTICE_AFTER_S
        until = time.monotonic() + self._join_timeout_s
        while not member.wait(lambda: member.accepted is not None, _POLL_INTERVAL_S):
            if member.is_over:
                raise not_taken_in(member, self.address, self.port, self._this, self._key_origin)
            if time.monotonic() > until:
                raise not_machine_0(self.address, self.port, "has not answered")
            if time.monotonic() > notice_at:
                notice_at = until
                place = f"machine 0 at {self.address}:{self.port}"
                print_notice(
                    f"waiting for {place}: something listens there, but has not answered yet"
                )
        assert member.accepted is not None
        if member.accepted.digest != self._facts.digest():
            member.send(self._facts)
        return member

    def _introduction(self) -> Join:
        return Join(
            machine=0 if self._hub is not None else self._asked_rank,
            least=self._least,
            most=self._most,
            host=socket.gethostname(),
            num_processes=self._plan.settings.num_processes,
            clock=time.time(),
        )

    def _is_machine_0(self) -> bool:
        """Return whether to listen: without ranks given, who is at the main address does."""
        if self._asked_rank is not None:
            return self._asked_rank == 0
        try:
            return any(is_here(one) for one in resolved(self.address))
        except (OSError, UnicodeError):
            return False

    def _listen(self) -> socket.socket | None:
        """Become machine 0 and return its own connection; None: another on this host is it."""
        try:
            listener = listening_socket(listening_host(self.address), self.port)
        except OSError:  # the address is that of a router to this machine, say
            listener = listening_socket("", self.port)
        except LaunchError:
            if self._asked_rank is None:
                return None
            raise
        self._key = run_key_of_machine_0(self._environ, say)
        coordinator = Coordinator(
            least=self._least,
            most=self._most,
            max_restarts=self._plan.settings.max_restarts,
            join_timeout_s=self._join_timeout_s,
            machine_timeout_s=self._timeout_s,
            facts=self._facts,
            say=say,
            now=time.monotonic(),
        )
        allow_open_files(self._most)
        self._hub = Hub(listener, self._key.key, coordinator, self._timeout_s, say)
        return self._hub.take_own_end()

    @property
    def _this(self) -> str:
        return "this machine" if self._asked_rank is None else f"machine {self._asked_rank}"

    @property
    def _key_origin(self) -> str:
        return self._key.origin if self._key is not None else "none"

    def _read_key(self) -> RunKey:
        """Return the run's key; machine 0 has written it before it listened."""
        until = time.monotonic() + _KEY_FILE_WITHIN_S
        while (key := run_key_of_other(self._environ)) is None and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL_S)
        return key or RunKey(b"", "none")

    def _open_store(self) -> int:
        """Open the store of the next round on this machine, and return its port."""
        host = listening_host(self.address) if is_literally_local(self.address) else ""
        listener = listening_socket(host, 0)
        port: int = listener.getsockname()[1]
        self._store = own_store(host or LOOPBACK, listener)
        return port

    def _listen_to_probe(self) -> int:
        """Listen on the address that machine 0 sees this one at, for another machine to try."""
        if self._probe is None:
            self._probe = listening_socket(self._own_host, 0)
        port: int = self._probe.getsockname()[1]
        return port

    @property
    def _own_host(self) -> str:
        assert self._member is not None
        return "" if self._hub is not None else self._member.own_address

    @property
    def _store_address(self) -> str:
        assert self._member is not None
        if self._hub is None:
            return self._member.address_of_machine_0
        return self._own_address or (self.address if is_literally_local(self.address) else LOOPBACK)

    def _wait_for_round(self, began: Round | None) -> Round:
        """Return the round that follows `began`, once all machines are there."""
        member = self._member
        assert member is not None
        tried: Probe | None = None
        missing = member.missing

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
                raise not_taken_in(member, self.address, self.port, self._this, self._key_origin)
            if member.missing is not missing and member.missing is not None:
                missing = member.missing
                print_notice(f"waiting for {missing.text}")

    def _connect_to_store(self, address: str, port: int) -> TCPStore:
        made = begin(
            TCPStore,
            address,
            port,
            is_master=False,
            timeout=timedelta(seconds=_STORE_TIMEOUT_S),
            wait_for_workers=False,
        )
        while not is_done(made, _POLL_INTERVAL_S):
            self._look()
        try:
            return made.result()
        except DistError as error:
            self._look()
            raise no_answer(address, port, error) from None

    def _look(self) -> None:
        """Raise RunEnded if the run has ended elsewhere."""
        member = self._member
        if member is None:
            return
        if member.ended_by is not None:
            self.ended_by = member.ended_by
        elif member.is_lost and not member.is_all_done:
            reason = member.lost or str(member.unacceptable)
            self.ended_by = loss(f"machine 0 ({self.address})", 0, self.address, reason, "")
        if self.ended_by is not None:
            raise RunEnded
        self._follow_stop(member)

    def _follow_stop(self, member: Member) -> None:
        """Stop as another machine has been stopped, unless the signal came here as well."""
        if member.stopping is None or self._has_stopped:
            return
        if self._stop_at is None:
            self._stop_at = time.monotonic() + _STOP_AFTER_S
        elif time.monotonic() > self._stop_at:
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

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._look()
            time.sleep(min(left_s, _POLL_INTERVAL_S))

    def tell_stop(self, number: int) -> None:
        if self._member is not None and not self._has_stopped:
            self._has_stopped = True
            if self._member.stopping is None:
                self._member.send(Stopping(int(number), socket.gethostname()))

    def give_up(self, failed: Failed) -> None:
        if self._member is not None and self.round >= 0 and self.ended_by is None:
            host = socket.gethostname()
            self._member.send(failed._replace(machine=self.machine, host=host))
            self._member.wait(lambda: False, _DECISION_WITHIN_S)

    def rank_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return which interface reaches the other machines, where the user has not said so."""
        member = self._member
        assert member is not None
        address = self._own_address if self._hub is not None else member.own_address
        interface = interface_of(address) if address else None
        if interface is None:
            return {}
        variables = {"GLOO_SOCKET_IFNAME": interface}
        if self._plan.settings.device == "cuda":
            variables["NCCL_SOCKET_IFNAME"] = f"={interface}"
        return {name: value for name, value in variables.items() if name not in environ}

    def shutdown(self) -> bool:
        """Leave the run; machine 0 first waits until the others have, at most the grace period."""
        self._store = None
        if self._probe is not None:
            self._probe.close()
        if self._member is not None:
            self._member.send(Bye())
            self._member.close()
        if self._hub is not None:
            self._hub.close(self._plan.settings.grace_period_s)
        if self._key is not None:
            self._key.forget()
        return True
