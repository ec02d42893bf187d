"""Rendezvous for a multi-node run: a machine joins the run, and then each of the run's rounds."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch.distributed.elastic.rendezvous import RendezvousInfo

from headway.devices.table import kind_of
from headway.errors import Code, HeadwayError, LaunchError
from headway.ipc.records import StepStats
from headway.ipc.run_contract import KEY_VARIABLE
from headway.ipc.stderr import log
from headway.launcher.multinode import messages, network
from headway.launcher.multinode.coordinator import Coordinator, failure_of, loss
from headway.launcher.multinode.hub import Hub
from headway.launcher.multinode.hub_client import HubClient
from headway.launcher.multinode.preflight import HOW_TO_SET, facts_of, run_key
from headway.launcher.multinode.rendezvous import Rendezvous, RunEnded, open_store
from headway.launcher.plan.plan import LaunchPlan
from headway.launcher.plan.variables import LOOPBACK

_ANSWER_TIMEOUT_S = 60.0  # machine 0 answers at once, unless it is suspended
_JOIN_TIMEOUT_S = 600.0  # machines of one job may start minutes apart
_DECISION_TIMEOUT_S = 5.0  # for machine 0, which may be suspended


class MultiNodeRendezvous(Rendezvous):
    """Rendezvous for a run on several machines.

    Machine 0 runs the hub, and all machines, including machine 0, connect to it. In each round,
    machine 0 starts a new store for the ranks, at the same address as the hub.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        environ: Mapping[str, str],
        run_id: str,
        join_timeout_s: float = _JOIN_TIMEOUT_S,
    ) -> None:
        settings = plan.settings
        super().__init__(run_id, settings.num_processes)
        assert settings.main_address is not None, "the plan has been checked"
        assert settings.main_port is not None
        self.member: HubClient | None = None
        self.hub: Hub | None = None  # on machine 0
        self._rank: int | None = settings.machine_rank
        self.machine = self._rank or 0
        self._address: str = settings.main_address
        self._port: int = settings.main_port
        self._main = network.host_port(self._address, self._port)
        self._this = "this machine" if self._rank is None else f"machine {self._rank}"
        self._settings = settings
        self._least, self._most = settings.num_machines.least, int(settings.num_machines)
        self._facts = facts_of(plan, torch.__version__)
        self._key = run_key(environ)
        self._timeout_s = float(settings.machine_timeout_s)
        self._join_timeout_s = join_timeout_s
        self._probe: socket.socket | None = None  # listens for another machine's probe
        self._own_address = ""  # as other machines see it
        self._is_done = False
        self._has_stopped = False  # a stop signal has arrived on any machine

    @property
    def restart(self) -> messages.Restart | None:  # type: ignore[override]
        """The requested restart of all machines; None if no restart is pending."""
        return self.member.restart if self.member is not None else None

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and wait until all machines have joined; raises RunEnded."""
        member = self.member or self.join()
        self._poll()
        self._store, self._is_done = None, False
        began, missing = member.round, member.missing
        local = self._address if network.is_loopback_host(self._address) else ""
        store_port = None
        if self.hub is not None:
            self._store, store_port = open_store(local)
        if self._probe is None:  # at the address by which machine 0 knows this one
            self._probe = network.listening_socket(member.own_address, 0)
        probe_port: int = self._probe.getsockname()[1]
        member.send(messages.MachineReady(probe_port, store_port, self.num_ranks))
        start = self._wait_for_round(member, began, missing)
        self.round, self.machine, self._own_address = start.number, start.machine, start.address
        self.first_rank, self.world_size = start.first_rank, start.world_size
        for note in start.notes:
            log(f"note: {note}")
        self._probe.close()
        self._probe = None
        address = member.address_of_machine_0 or self._own_address or local or LOOPBACK
        return self._info(start.machine, start.num_machines, address, start.store_port)

    def _wait_for_round(
        self, member: HubClient, began: messages.StartRound | None, missing: messages.Missing | None
    ) -> messages.StartRound:
        """Wait for the round after `began`; log missing machines if they differ from `missing`."""
        tried: messages.Probe | None = None

        def has_news() -> bool:
            return member.round is not began or member.probe is not tried

        while True:
            if member.wait(has_news, network.CHECK_EVERY_S):
                if member.round is not None and member.round is not began:
                    return member.round
                tried = member.probe
                if tried is not None:
                    address = network.reachable_address(tried.address, member.own_address)
                    to_try = tried._replace(address=address)
                    member.send(messages.Probed(network.probe_machine(to_try)))
                continue
            self._poll()
            if member.is_all_done:
                log("the run succeeded without ranks on this machine")
                raise RunEnded
            if member.refused is not None:
                raise self._join_error()
            if member.missing is not missing and member.missing is not None:
                missing = member.missing
                main = self._address
                only = f", at main_address {main}, which no other host can reach"
                log(f"waiting for {missing.text}{only * network.is_loopback_host(main)}")

    def _poll(self) -> None:
        member = self.member
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

    def _loss_of_machine_0(self, member: HubClient) -> messages.Failed:
        address = self._address
        reason = member.lost or str(member.peer_error)
        return loss(f"machine 0 ({address})", 0, address, reason, "")

    def remote_failure(self) -> messages.Failed | None:
        member = self.member
        if member is None or member.is_all_done:
            return None
        return self._loss_of_machine_0(member) if member.is_silent else member.ended_by

    def _follow_stop(self, member: HubClient) -> None:
        """If another machine received a stop signal, raise it here, but only once."""
        if member.stopping is None or self._has_stopped:
            return
        number = signal.Signals(member.stopping.signal)
        log(f"stopped by {number.name} on {member.stopping.host}")
        self.forwards_stop = True
        try:
            signal.raise_signal(number)
        finally:
            self.forwards_stop = False

    def num_nodes_waiting(self) -> int:
        self._poll()
        return int(self.restart is not None)

    def restarts_after(self, describe: Callable[[], messages.Failed | None]) -> bool:
        member = self.member
        assert member is not None
        sent: messages.Failed | None = None
        began = time.monotonic()
        while not member.wait(lambda: member.restart is not None, network.CHECK_EVERY_S):
            if member.stopping is not None:
                self._follow_stop(member)  # it caused the failure of the ranks here
            failed = describe()
            assert failed is not None, "torch has seen it"
            within_s = self._timeout_s * failed.suspicion + _DECISION_TIMEOUT_S
            if member.is_over or time.monotonic() > began + within_s:
                break
            if sent is None or (failed.cause, failed.suspicion) != (sent.cause, sent.suspicion):
                sent = failed
                member.send(failed)
        with suppress(RunEnded):
            self._poll()
        return self.restart is not None

    def are_all_done(self, describe_silent_exit: Callable[[], messages.Failed | None]) -> bool:
        member = self.member
        assert member is not None
        if not self._is_done:
            self._is_done = True
            member.send(messages.Done(describe_silent_exit()))
        return member.wait(lambda: member.is_all_done, network.CHECK_EVERY_S)

    def report_stop(self, number: int, *, ends_grace: bool) -> None:
        member = self.member
        if member is not None and (ends_grace or not self._has_stopped):
            self._has_stopped = True
            if ends_grace or member.stopping is None:
                member.send(messages.Signalled(int(number), socket.gethostname(), ends_grace))

    def report_steps(self, rank: int, stats: StepStats) -> None:
        member = self.member
        if member is not None and self.hub is None and not member.is_over:
            member.send(messages.StepTiming(rank, stats))

    def give_up(self, error: HeadwayError) -> None:
        member = self.member
        if member is not None and member.accepted is not None and self.ended_by is None:
            member.send(failure_of(error, self.machine))
            member.wait(lambda: False, _DECISION_TIMEOUT_S)

    def rank_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return variables that select the network interface, unless the user has set them."""
        member = self.member
        assert member is not None
        address = member.own_address or self._own_address
        interface = network.interface_with(address) if address else None
        if interface is None:
            return {}
        interfaces = kind_of(self._settings.device).interfaces.items()
        return {name: exactly + interface for name, exactly in interfaces if name not in environ}

    def shutdown(self) -> bool:
        self._store = None
        if self._probe is not None:
            self._probe.close()
        if self.member is not None:
            self.member.send(messages.Leave())
            self.member.close()
        if self.hub is not None:
            self.hub.close(self._settings.grace_period_s)
        return True

    def join(self) -> HubClient:
        """Return the hub client once machine 0 has accepted this machine or reported the run's end.

        This method waits until machine 0's name resolves and machine 0 answers. It reconnects if
        the connection is closed, because a tunnel or load balancer closes connections until machine
        0 is listening. Raises LaunchError if machine 0 cannot be reached, if the port is in use, or
        if this machine is refused.
        """
        until = time.monotonic() + self._join_timeout_s
        notice_at = time.monotonic() + network.NOTICE_AFTER_S
        is_resolved = is_machine_0 = False
        while True:
            if not is_resolved:
                is_machine_0 = network.is_machine_0(self._rank, self._address)
                link = self._listen() if is_machine_0 else None
                if link is not None:
                    return self._join_over(link)
            try:
                link = network.connect_to(self._address, self._port)
            except UnicodeError as error:
                raise self._cannot_reach(f"it is not a host name: {error}") from None
            except OSError as error:
                reason = error.strerror or str(error)
                is_resolved = not isinstance(error, socket.gaierror)
            else:
                is_resolved = True
                member = self._join_over(link)
                if not member.is_closed_unanswered:
                    return member
                member.close()
                reason = "the program that listens there closes the connection"
            if time.monotonic() > until:
                raise self._cannot_reach(reason)
            if time.monotonic() > notice_at:
                notice_at = until
                own = ", which is not on this machine: if this is machine 0, pass --machine-rank 0"
                is_elsewhere = self._rank is None and not is_machine_0
                log(f"waiting for machine 0 at {self._main}{own * is_elsewhere} ({reason})")
            time.sleep(network.CHECK_EVERY_S)

    def _cannot_reach(self, reason: str) -> LaunchError:
        return LaunchError(
            f"{self._this} cannot reach machine 0 at {self._main}: {reason}",
            where=self._place,
            fix="start the run on machine 0, and open that port in its firewall; --main-address "
            "must be a name or IP address of machine 0 that all machines can reach",
            code=Code.NO_CONNECTION,
        )

    def _join_over(self, link: socket.socket) -> HubClient:
        """Join over `link`; return the client once machine 0 has answered or closed the link."""
        member = self.member = HubClient(link, self._key, self._timeout_s)
        member.on_grace_end = self.end_grace_period
        rank = self._rank if self.hub is None else 0
        host = socket.gethostname()
        member.send(messages.Join(rank, self._least, self._most, host, self._facts))
        notice_at = time.monotonic() + network.NOTICE_AFTER_S
        until = time.monotonic() + min(self._join_timeout_s, _ANSWER_TIMEOUT_S)
        while not member.wait(lambda: member.accepted is not None, network.CHECK_EVERY_S):
            if member.ended_by is not None or member.is_closed_unanswered:
                return member
            if member.is_over:
                raise self._join_error()
            if time.monotonic() > until:
                raise self._not_machine_0("it did not answer")
            if time.monotonic() > notice_at:
                notice_at = until
                log(
                    f"waiting for machine 0 at {self._main}: a program is listening there, but has "
                    "not answered yet"
                )
        return member

    def _join_error(self) -> LaunchError:
        assert self.member is not None
        refused, peer_error = self.member.refused, self.member.peer_error
        if refused is not None:
            return LaunchError(
                refused.what, where=refused.where, fix=refused.fix, code=Code.REFUSED
            )
        if peer_error is None or not peer_error.reason:
            return self._not_machine_0(str(peer_error or "it closed the connection"))
        if peer_error.reason == "version":
            return LaunchError(
                f"machine 0 at {self._main} runs another version of Headway",
                where=self._this,
                fix="install the same version on every machine",
                code=Code.OTHER_VERSION,
            )
        return LaunchError(
            f"machine 0 at {self._main} does not accept the key of {self._this}",
            where=f"environment {KEY_VARIABLE}" + ("" if self._key else ", which is not set"),
            fix=f"another run may be listening there: pass another --main-port; or {HOW_TO_SET}",
            code=Code.KEY,
        )

    def _not_machine_0(self, what: str) -> LaunchError:
        return LaunchError(
            f"the program at {self._main} is not machine 0 of a run: {what}",
            where=self._place,
            fix="start the run on machine 0, or, if another program uses that port there, pass "
            "another --main-port on every machine",
            code=Code.NO_CONNECTION,
        )

    @property
    def _place(self) -> str:
        return f"main_address {self._address}, main_port {self._port}"

    def _listen(self) -> socket.socket | None:
        """Become machine 0 and return a connection to it; None if another process is machine 0."""
        try:
            listener = network.listen_as_machine_0(self._address, self._port)
        except network.PortInUse:
            if self._rank is None:
                return None
            raise
        coordinator = Coordinator(
            least=self._least,
            most=self._most,
            max_restarts=self._settings.max_restarts,
            join_timeout_s=self._join_timeout_s,
            machine_timeout_s=self._timeout_s,
            facts=self._facts,
            log=log,
            now=time.monotonic(),
        )
        coordinator.callbacks = self.callbacks
        self.hub = Hub(listener, self._key, coordinator, self._timeout_s, log)
        return self.hub.own_end
