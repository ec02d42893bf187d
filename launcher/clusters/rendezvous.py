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
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import cast

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from headway.errors import LaunchError
from headway.launcher.clusters.store_calls import (
    AnsweringStore,
    begin,
    interruptible,
    is_done,
    result_of,
)
from headway.launcher.planning.plan import LOOPBACK

BACKEND = "headway"
JOIN_TIMEOUT_S = 600.0
_AGENT_KEYS = "headway/"  # keys of the agents; all other keys in the store are the ranks'
_FAILED = _AGENT_KEYS + "failed"  # the rank of the first machine that gave up
_ACKNOWLEDGED = _AGENT_KEYS + "machine_{}_knows_failure"
_OWN_STORE_TIMEOUT_S = 60.0  # for machine 0 to connect to itself
_ACKNOWLEDGE_TIMEOUT_S = 5.0  # a machine that has joined may still be importing torch
_ANSWER_TIMEOUT_S = 30.0  # for a store, beyond what it waits for on behalf of its caller
_POLL_INTERVAL_S = 0.1
_NOTICE_AFTER_S = 1.0  # then print which machines are missing
_PORT_ERRORS = {
    errno.EADDRINUSE: (
        "port {port} is in use on this machine",
        "pass another --main-port, the same on every machine",
    ),
    errno.EACCES: (
        "this user may not listen on port {port}",
        "pass a --main-port above 1023, the same on every machine",
    ),
    errno.EMFILE: (
        "the launcher may not open a socket: too many open files",
        "raise the limit of open files: `ulimit -n 4096`",
    ),
}


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
        self._looking: Future[tuple[str, bool]] | None = None  # not answered yet

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
        self._looking = None
        try:
            if self._store is None:
                self._store = self._listen() if self.machine_rank == 0 else self._connect()
            self.round += 1
            store = PrefixStore(self._round_keys(self.round), self._store)
            within_s = self.join_timeout_s + _ANSWER_TIMEOUT_S
            answering = AnsweringStore(store, within_s, self._connection_lost)
            if self.num_machines > 1:
                self._join_round(answering)
            self._open_round(answering)
        except DistError as error:
            raise self._connection_lost(error) from None
        return RendezvousInfo(
            cast(Store, answering),
            self.machine_rank,
            self.num_machines,
            RendezvousStoreInfo(self.address, self.port),
        )

    def num_nodes_waiting(self) -> int:
        """Return 1 when another machine, whose ranks failed, has started the next round; else 0.

        It is 0 too as long as machine 0 does not answer: the ranks here are watched all the same.

        Raises:
            LaunchError: another machine gave up, or machine 0 is gone.
        """
        if self._store is None or self.num_machines == 1:
            return 0
        looked = self._looking or begin(self._look, self._store)
        self._looking = None if is_done(looked, _POLL_INTERVAL_S) else looked
        if self._looking is not None:
            return 0
        try:
            machine, is_next_round = looked.result()
        except DistError as error:
            raise self._connection_lost(error) from None
        if machine:
            raise LaunchError(
                f"machine {machine} failed, so this one stopped too",
                where=f"machine {self.machine_rank} of {self.num_machines}",
                fix=f"see the output of machine {machine} for the cause",
            )
        return int(is_next_round)

    def _look(self, store: Store) -> tuple[str, bool]:
        """Return which machine gave up, if one did, and whether the next round was started."""
        if not store.check([_FAILED]):
            return "", store.check([f"{self._round_keys(self.round + 1)}/started"])
        store.set(_ACKNOWLEDGED.format(self.machine_rank), "1")
        return store.get(_FAILED).decode(), False

    def announce_failure(self) -> None:
        """Tell the other machines that this one gives up, unless machine 0 does not answer."""
        if self._store is not None and self.num_machines > 1:
            is_done(begin(self._note_failure, self._store), _ACKNOWLEDGE_TIMEOUT_S)

    def _note_failure(self, store: Store) -> None:
        with suppress(DistError):  # machine 0 is gone; the others find that out by themselves
            store.set(_ACKNOWLEDGED.format(self.machine_rank), "1")
            store.compare_set(_FAILED, "", str(self.machine_rank))  # unless another was first

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
        missing = self._missing(PrefixStore(self._round_keys(self.round), self._store))
        return [rank for rank in range(self.num_machines) if rank not in missing]

    def _missing(self, store: Store | AnsweringStore) -> list[int]:
        """Return the ranks of the machines that have not joined the round with these keys."""
        return [rank for rank in range(self.num_machines) if not store.check([f"machine_{rank}"])]

    @staticmethod
    def _round_keys(number: int) -> str:
        return f"{_AGENT_KEYS}round_{number}"

    def _listen(self) -> TCPStore:
        listener = _listening_socket(self.address, self.port)
        self.port = listener.getsockname()[1]
        store = self._make_store(
            f"this machine's own store at {self.address}:{self.port}",
            "the store of this machine does not answer",
            "check the loopback interface (`ip address show lo`) and the limit of open files "
            "(`ulimit -n`)",
            timeout_s=_OWN_STORE_TIMEOUT_S,
            master_listen_fd=listener.detach(),  # the store closes it
        )
        store.set_timeout(timedelta(seconds=self.join_timeout_s))
        return store

    def _connect(self) -> TCPStore:
        _wait_for_port(self.address, self.port, self.machine_rank, self.join_timeout_s)
        return self._make_store(
            f"machine 0 at {self.address}:{self.port}: something listens there, but has not "
            "answered yet",
            "what listens there has not answered as machine 0 of a run",
            "start the run on machine 0, or, if another program uses that port there, pass another "
            "--main-port on every machine",
            timeout_s=self.join_timeout_s,
        )

    def _make_store(
        self,
        waits_for: str,
        what: str,
        fix: str,
        *,
        timeout_s: float,
        master_listen_fd: int | None = None,
    ) -> TCPStore:
        made = begin(
            TCPStore,
            self.address,
            self.port,
            is_master=master_listen_fd is not None,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=master_listen_fd,
        )
        if not is_done(made, _NOTICE_AFTER_S):
            _print_notice(f"waiting for {waits_for}")
        try:
            return result_of(made)
        except DistError as error:
            raise LaunchError(
                f"{what}: {self.address}:{self.port}", where=self._where(error), fix=fix
            ) from None

    def _join_round(self, store: AnsweringStore) -> None:
        """Wait until every machine has joined this round with a rank of its own."""
        store.set("started", "1")
        if store.add(f"claim_{self.machine_rank}", 1) > 1:
            raise LaunchError(
                f"machine_rank {self.machine_rank} was given to two machines",
                where=f"the run at {self.address}:{self.port}",
                fix=f"give every machine its own --machine-rank, from 0 to {self.num_machines - 1}",
            )
        store.set(f"machine_{self.machine_rank}", str(self.num_machines))
        deadline, notice_at = _from_now(self.join_timeout_s), _from_now(_NOTICE_AFTER_S)
        while missing := self._missing(store):
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

    def _open_round(self, store: AnsweringStore) -> None:
        """Return when the store holds no keys of earlier rounds' ranks, so that ranks may start."""
        if self.machine_rank != 0:
            while not store.check(["open"]):
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
            where=self._where(error),
            fix="see the output of machine 0; if it is still running, check the network to it",
        )

    def _where(self, error: Exception) -> str:
        said = str(error).splitlines()[0]
        who = "torch says: " if isinstance(error, DistError) else ""
        return f"machine {self.machine_rank} of {self.num_machines}; {who}{said}"


def _listening_socket(address: str, port: int) -> socket.socket:
    """Listen on `address`, or on all of this machine's addresses if `address` is none of them."""
    for host in (address, ""):
        try:
            family = socket.AF_INET if host == "" else _family(host)
            return socket.create_server((host, port), family=family, backlog=2048)
        except OSError as error:
            if error.errno in _PORT_ERRORS:
                what, fix = _PORT_ERRORS[error.errno]
                raise LaunchError(
                    what.format(port=port),
                    where=f"main_address {address}, main_port {port}",
                    fix=fix,
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
            interruptible(socket.create_connection, (address, port), timeout=5).close()
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
    with suppress(OSError):  # stderr cannot be written to
        print(f"headway: {line}", file=sys.stderr, flush=True)
