"""How the machines of a run find each other: fixed machine ranks over one TCPStore.

torch's own c10d rendezvous sorts the machines itself (an agent that asked for rank 1 can get 0).
Here machine 0 listens, the others connect, and every machine keeps the rank it was given. A run on
one machine listens on the loopback device only.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from headway.errors import LaunchError
from headway.launcher.planning.plan import LOOPBACK

BACKEND = "headway"
JOIN_TIMEOUT_S = 600.0
_OWN_KEYS = "headway/"  # the agents' keys; all others in the store are the ranks'
_FAILED = _OWN_KEYS + "failed"
_KNOWS = _OWN_KEYS + "machine_{}_knows"  # of the failure
_HEARD_WITHIN_S = 5.0  # a machine that has joined may still be importing torch
_POLL_S = 0.1
_PATIENCE_S = 3.0  # silence before a line says whom we wait for


class FixedRendezvous(RendezvousHandler):
    """One agent's membership in a run of `num_machines` agents whose ranks are settled beforehand.

    Each call of `next_rendezvous` opens the next round, and all machines join it; a machine that
    lost its ranks thereby calls the others. Before a new round opens, machine 0 removes what the
    ranks of the last one wrote: torch uses the same keys again and would find dead addresses.
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
        self.port = port  # 0: the system chooses, known after the first round
        self.machine_rank = machine_rank
        self.num_machines = num_machines
        self.run_id = run_id
        self.join_timeout_s = join_timeout_s
        self.round = -1
        self._server: Store | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks meet in the agents' store: no second port, and nothing to race for."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and return when all machines have.

        Raises:
            LaunchError: machine 0 cannot be reached, the port is taken, a machine is missing or its
                settings do not fit ours.
        """
        try:
            if self._server is None:
                self._server = self._listen() if self.machine_rank == 0 else self._connect()
            self.round += 1
            store = PrefixStore(f"{_OWN_KEYS}round_{self.round}", self._server)
            if self.num_machines > 1:
                self._meet(store)
            self._open(store)
        except DistError as error:
            raise self._lost(error) from None
        return RendezvousInfo(
            store,
            self.machine_rank,
            self.num_machines,
            RendezvousStoreInfo(self.address, self.port),
        )

    def num_nodes_waiting(self) -> int:
        """Return whether another machine has called for the next round (it lost its ranks).

        Raises:
            LaunchError: another machine gave up, or machine 0 is gone.
        """
        if self._server is None or self.num_machines == 1:
            return 0
        try:
            if self._server.check([_FAILED]):
                self._server.set(_KNOWS.format(self.machine_rank), "1")
                machine = self._server.get(_FAILED).decode()
                raise LaunchError(
                    f"machine {machine} failed, so this one stopped too",
                    where=f"machine {self.machine_rank} of {self.num_machines}",
                    fix=f"read the output of machine {machine}: the cause stands there",
                )
            return int(self._server.check([f"{_OWN_KEYS}round_{self.round + 1}/called"]))
        except DistError as error:
            raise self._lost(error) from None

    def announce_failure(self) -> None:
        """Tell the other machines that this one gives up."""
        if self._server is not None and self.num_machines > 1:
            try:
                self._server.set(_KNOWS.format(self.machine_rank), "1")
                if not self._server.check([_FAILED]):
                    self._server.set(_FAILED, str(self.machine_rank))
            except DistError:
                pass  # machine 0 is gone; the others notice by themselves

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        """Leave the other machines; machine 0 first lets them hear of a failure, for a while."""
        deadline = time.monotonic() + _HEARD_WITHIN_S
        with suppress(DistError):
            while (
                self._server is not None
                and self.machine_rank == 0
                and self._server.check([_FAILED])
                and not self._server.check([_KNOWS.format(rank) for rank in self._joined()])
                and time.monotonic() < deadline
            ):
                time.sleep(0.05)
        self._server = None
        return True

    def _joined(self) -> list[int]:
        """Return the machines that have joined this round."""
        assert self._server is not None
        place = f"{_OWN_KEYS}round_{self.round}/machine_{{}}"
        ranks = range(self.num_machines)
        return [rank for rank in ranks if self._server.check([place.format(rank)])]

    def _listen(self) -> TCPStore:
        listener = _bind(self.address, self.port)
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

    def _meet(self, store: Store) -> None:
        """Wait until every machine has joined this round, and check that all mean the same run."""
        store.set("called", "1")
        if store.add(f"claim_{self.machine_rank}", 1) > 1:
            raise LaunchError(
                f"machine_rank {self.machine_rank} was given to two machines",
                where=f"the run at {self.address}:{self.port}",
                fix=f"give every machine its own --machine-rank, from 0 to {self.num_machines - 1}",
            )
        store.set(f"machine_{self.machine_rank}", json.dumps(self.num_machines))
        missing = list(range(self.num_machines))
        deadline, speak_at = _from_now(self.join_timeout_s), _from_now(_PATIENCE_S)
        while missing := [rank for rank in missing if not store.check([f"machine_{rank}"])]:
            named = ", ".join(map(str, missing))
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"machine {named} did not join within {self.join_timeout_s:.0f} s",
                    where=f"machine {self.machine_rank} of {self.num_machines}",
                    fix="run the same command there, with its own --machine-rank",
                )
            if time.monotonic() > speak_at:
                _say(f"waiting for machine {named} of {self.num_machines}")
                speak_at = deadline
            time.sleep(_POLL_S)
        expected = json.loads(store.get("machine_0"))
        if expected != self.num_machines:
            raise LaunchError(
                f"num_machines is {self.num_machines} here, but {expected} on machine 0",
                where=f"machine {self.machine_rank}, and machine 0 at {self.address}",
                fix="pass the same --num-machines on every machine",
            )

    def _open(self, store: Store) -> None:
        """Let the ranks of this round start, in a store that holds nothing of earlier ones."""
        if self.machine_rank != 0:
            while not store.check(["open"]):  # in steps, so that a stop signal is heard
                time.sleep(_POLL_S)
            return
        assert self._server is not None
        if self.round > 0:
            for key in self._server.list_keys():
                if not key.startswith(_OWN_KEYS):
                    self._server.delete_key(key)
        store.set("open", "1")

    def _lost(self, error: Exception) -> LaunchError:
        return LaunchError(
            f"the connection to machine 0 at {self.address}:{self.port} is lost",
            where=f"machine {self.machine_rank} of {self.num_machines}; torch says: "
            f"{str(error).splitlines()[0]}",
            fix="look at the output of machine 0: it stopped, or the network between you did",
        )


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Build a handler from torch's parameters, as its registry asks for one."""
    host, _, port = params.endpoint.rpartition(":")
    return FixedRendezvous(
        address=host,
        port=int(port),
        machine_rank=int(params.get("machine_rank")),
        num_machines=params.max_nodes,
        run_id=params.run_id,
    )


rendezvous_handler_registry.register(BACKEND, create_handler)


def _bind(address: str, port: int) -> socket.socket:
    """Return a socket that listens on `address`, or on all of them if it is not this machine's."""
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
                    f"port {port} may not be opened by this user",
                    where=f"main_address {address}, main_port {port}",
                    fix="pass a --main-port above 1023, the same on every machine",
                ) from None
            if address == LOOPBACK or host == "" or isinstance(error, socket.gaierror):
                raise _unknown_address(address, error) from None
    raise AssertionError("the loop returns or raises")


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _wait_for_port(address: str, port: int, machine_rank: int, timeout_s: float) -> None:
    """Return once something listens there, so that a wrong address is named and not waited for."""
    deadline, speak_at = _from_now(timeout_s), _from_now(_PATIENCE_S)
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
                    fix="start the run on machine 0, and let its firewall pass that port",
                ) from None
            if time.monotonic() > speak_at:
                _say(f"waiting for machine 0 at {address}:{port} ({error.strerror or error})")
                speak_at = deadline
            time.sleep(_POLL_S)


def _from_now(seconds: float) -> float:
    return time.monotonic() + seconds


def _unknown_address(address: str, error: OSError) -> LaunchError:
    return LaunchError(
        f"main_address {address!r} cannot be used: {error.strerror or error}",
        where=f"main_address {address}",
        fix="pass --main-address with a name or IP address of machine 0 that every machine knows",
    )


def _say(line: str) -> None:
    print(f"headway: {line}", file=sys.stderr, flush=True)
