"""How the machines of one run find each other: fixed machine ranks over one TCPStore.

torch's c10d rendezvous numbers the machines itself (an agent that asked for rank 1 can get 0).
Here machine 0 listens, the others connect, and every machine keeps the rank it was given. A run on
one machine listens on the loopback device only.
"""

from __future__ import annotations

import errno
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from headway.errors import LaunchError
from headway.launcher.planning.plan import LOOPBACK

BACKEND = "headway"
JOIN_TIMEOUT_S = 600.0
_AGENT_KEYS = "headway/"  # keys of the agents; all other keys in the store are the ranks'
_FAILED = _AGENT_KEYS + "failed"  # the rank of the first machine that gave up
_ACKNOWLEDGED = _AGENT_KEYS + "machine_{}_knows_failure"
_ACKNOWLEDGE_TIMEOUT_S = 5.0  # a machine that has joined may still be importing torch
_POLL_INTERVAL_S = 0.1
_NOTICE_AFTER_S = 1.0  # then print which machines are missing


class FixedRendezvous(RendezvousHandler):
    """One agent's membership in a run of `num_machines` agents with machine ranks known beforehand.

    Each call of `next_rendezvous` starts a new round, which all machines join: a machine whose
    ranks failed asks the others for a restart in this way. Before a round opens, machine 0 deletes
    the keys of the previous round's ranks: torch uses the same keys again and would read the
    addresses of dead processes.

    Args:
        address: of machine 0.
        port: on machine 0; with 0 the system chooses one, known after the first round.
        machine_rank: of this machine.
        num_machines: in the run.
        run_id: passed on to the ranks.
        join_timeout_s: how long to wait for machine 0 and for missing machines.
    """

    def __init__(
        self,
        address: str,
        port: int,
        machine_rank: int,
        num_machines: int,
        run_id: str,
        join_timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        self.address = address
        self.port = port
        self.machine_rank = machine_rank
        self.num_machines = num_machines
        self.run_id = run_id
        self.join_timeout_s = join_timeout_s
        self.round = -1
        self._store: Store | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the agents' store: no second port that another process could take."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and return when all machines have joined.

        Raises:
            LaunchError: machine 0 cannot be reached, the port is in use, a machine is missing or
                has other settings.
        """
        try:
            if self._store is None:
                self._store = self._listen() if self.machine_rank == 0 else self._connect()
            self.round += 1
            store = PrefixStore(self._round_keys(self.round), self._store)
            if self.num_machines > 1:
                self._join_round(store)
            self._open_round(store)
        except DistError as error:
            raise self._connection_lost(error) from None
        return RendezvousInfo(
            store,
            self.machine_rank,
            self.num_machines,
            RendezvousStoreInfo(self.address, self.port),
        )

    def num_nodes_waiting(self) -> int:
        """Return 1 when another machine, whose ranks failed, has started the next round; else 0.

        Raises:
            LaunchError: another machine gave up, or machine 0 is gone.
        """
        if self._store is None or self.num_machines == 1:
            return 0
        try:
            if self._store.check([_FAILED]):
                self._store.set(_ACKNOWLEDGED.format(self.machine_rank), "1")
                machine = self._store.get(_FAILED).decode()
                raise LaunchError(
                    f"machine {machine} failed, so this one stopped too",
                    where=f"machine {self.machine_rank} of {self.num_machines}",
                    fix=f"see the output of machine {machine} for the cause",
                )
            return int(self._store.check([f"{self._round_keys(self.round + 1)}/started"]))
        except DistError as error:
            raise self._connection_lost(error) from None

    def announce_failure(self) -> None:
        """Tell the other machines that this one gives up."""
        if self._store is not None and self.num_machines > 1:
            try:
                self._store.set(_ACKNOWLEDGED.format(self.machine_rank), "1")
                if not self._store.check([_FAILED]):
                    self._store.set(_FAILED, str(self.machine_rank))
            except DistError:
                pass  # machine 0 is gone; the others find that out by themselves

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        """Leave the run; machine 0 first waits until the others have read that a machine failed."""
        deadline = time.monotonic() + _ACKNOWLEDGE_TIMEOUT_S
        with suppress(DistError):
            while (
                self._store is not None
                and self.machine_rank == 0
                and self._store.check([_FAILED])
                and not self._store.check([_ACKNOWLEDGED.format(rank) for rank in self._joined()])
                and time.monotonic() < deadline
            ):
                time.sleep(0.05)
        self._store = None
        return True

    def _joined(self) -> list[int]:
        """Return the ranks of the machines that have joined this round."""
        assert self._store is not None
        store = PrefixStore(self._round_keys(self.round), self._store)
        return [rank for rank in range(self.num_machines) if store.check([f"machine_{rank}"])]

    @staticmethod
    def _round_keys(number: int) -> str:
        return f"{_AGENT_KEYS}round_{number}"

    def _listen(self) -> TCPStore:
        listener = _listening_socket(self.address, self.port)
        self.port = listener.getsockname()[1]
        return TCPStore(
            self.address,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=self.join_timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )

    def _connect(self) -> TCPStore:
        _wait_for_port(self.address, self.port, self.machine_rank, self.join_timeout_s)
        return TCPStore(
            self.address,
            self.port,
            is_master=False,
            timeout=timedelta(seconds=self.join_timeout_s),
            wait_for_workers=False,
        )

    def _join_round(self, store: Store) -> None:
        """Wait until every machine has joined this round with a rank of its own."""
        store.set("started", "1")
        if store.add(f"claim_{self.machine_rank}", 1) > 1:
            raise LaunchError(
                f"machine_rank {self.machine_rank} was given to two machines",
                where=f"the run at {self.address}:{self.port}",
                fix=f"give every machine its own --machine-rank, from 0 to {self.num_machines - 1}",
            )
        store.set(f"machine_{self.machine_rank}", str(self.num_machines))
        missing = list(range(self.num_machines))
        deadline, notice_at = _from_now(self.join_timeout_s), _from_now(_NOTICE_AFTER_S)
        while missing := [rank for rank in missing if not store.check([f"machine_{rank}"])]:
            named = ", ".join(map(str, missing))
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"machine {named} did not join within {self.join_timeout_s:.0f} s",
                    where=f"machine {self.machine_rank} of {self.num_machines}",
                    fix="start the same command on every machine, each with its own --machine-rank",
                )
            if time.monotonic() > notice_at:
                _print_notice(f"waiting for machine {named} of {self.num_machines}")
                notice_at = deadline
            time.sleep(_POLL_INTERVAL_S)
        expected = int(store.get("machine_0"))
        if expected != self.num_machines:
            raise LaunchError(
                f"num_machines is {self.num_machines} here, but {expected} on machine 0",
                where=f"machine {self.machine_rank}, and machine 0 at {self.address}",
                fix="pass the same --num-machines on every machine",
            )

    def _open_round(self, store: Store) -> None:
        """Return when the store holds no keys of earlier rounds' ranks, so that ranks may start."""
        if self.machine_rank != 0:
            while not store.check(["open"]):  # no blocking wait: signals are handled in between
                time.sleep(_POLL_INTERVAL_S)
            return
        assert self._store is not None
        if self.round > 0:
            for key in self._store.list_keys():
                if not key.startswith(_AGENT_KEYS):
                    self._store.delete_key(key)
        store.set("open", "1")

    def _connection_lost(self, error: Exception) -> LaunchError:
        return LaunchError(
            f"machine {self.machine_rank} lost the connection to machine 0 at "
            f"{self.address}:{self.port}",
            where=f"machine {self.machine_rank} of {self.num_machines}; torch says: "
            f"{str(error).splitlines()[0]}",
            fix="see the output of machine 0; if it is still running, check the network to it",
        )


def _listening_socket(address: str, port: int) -> socket.socket:
    """Listen on `address`, or on all of this machine's addresses if `address` is none of them."""
    for host in (address, ""):
        try:
            family = socket.AF_INET if host == "" else _family(host)
            return socket.create_server((host, port), family=family, backlog=2048)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"port {port} is in use on this machine",
                    where=f"main_address {address}, main_port {port}",
                    fix="pass another --main-port, the same on every machine",
                ) from None
            if error.errno == errno.EACCES:
                raise LaunchError(
                    f"this user may not listen on port {port}",
                    where=f"main_address {address}, main_port {port}",
                    fix="pass a --main-port above 1023, the same on every machine",
                ) from None
            if address == LOOPBACK or host == "" or isinstance(error, socket.gaierror):
                raise _unknown_address(address, error) from None
    raise AssertionError("the loop returns or raises")


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _wait_for_port(address: str, port: int, machine_rank: int, timeout_s: float) -> None:
    """Return once something listens there; a name that cannot be resolved is an error at once."""
    deadline, notice_at = _from_now(timeout_s), _from_now(_NOTICE_AFTER_S)
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except socket.gaierror as error:
            raise _unknown_address(address, error) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"machine {machine_rank} cannot reach machine 0 at {address}:{port}: "
                    f"{error.strerror or error}",
                    where=f"main_address {address}, main_port {port}",
                    fix="start the run on machine 0, and open that port in its firewall",
                ) from None
            if time.monotonic() > notice_at:
                reason = error.strerror or error
                _print_notice(f"waiting for machine 0 at {address}:{port} ({reason})")
                notice_at = deadline
            time.sleep(_POLL_INTERVAL_S)


def _from_now(seconds: float) -> float:
    return time.monotonic() + seconds


def _unknown_address(address: str, error: OSError) -> LaunchError:
    return LaunchError(
        f"main_address {address!r} cannot be used: {error.strerror or error}",
        where=f"main_address {address}",
        fix="pass --main-address with a name or IP address of machine 0 that all machines know",
    )


def _print_notice(line: str) -> None:
    print(f"headway: {line}", file=sys.stderr, flush=True)
