"""Rendezvous for a run on a single machine, with torch's store on the loopback interface only.

Only the ranks use the store. `membership.py` supports several machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import cast

from torch.distributed import DistError, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from headway.errors import Code, HeadwayError, LaunchError
from headway.ipc.records import StepStats
from headway.launcher.multinode.coordinator import RankCallbacks
from headway.launcher.multinode.messages import Failed, Restart
from headway.launcher.multinode.network import CHECK_EVERY_S, host_port, listening_socket
from headway.launcher.plan.variables import LOOPBACK

_STORE_TIMEOUT = timedelta(seconds=10)  # for a connection to a new store on this machine


class RunEnded(Exception):
    """Raised if the run ended on another machine; `Rendezvous.ended_by` is its failure, if any."""


class Rendezvous(RendezvousHandler):
    """Rendezvous for a run on a single machine.

    Each attempt is a round with a new store. With an old store, torch would reuse its keys and read
    the addresses of exited processes. The ranks receive `run_id`; `num_ranks` run on this machine.
    """

    machine = 0  # the rank of this machine, once the first round has started
    ended_by: Failed | None = None  # the run's failure, if another machine reported it
    has_lost_machine_0 = False  # the loss ended the run
    forwards_stop = False  # the stop signal that is being raised comes from another machine
    restart: Restart | None = None  # requested for all machines, but not started yet

    def __init__(self, run_id: str, num_ranks: int) -> None:
        self.run_id = run_id
        self.round = -1
        self.num_ranks = num_ranks
        self.first_rank, self.world_size = 0, num_ranks  # of the round
        self.callbacks = RankCallbacks()
        self.end_grace_period: Callable[[], None] = lambda: None  # called by another thread
        self._store: Store | None = None

    def get_backend(self) -> str:
        return "headway"

    def next_rendezvous(self) -> RendezvousInfo:
        """Start the next round; raises LaunchError if the store cannot be created."""
        self._store = None  # closes the previous one
        self.round += 1
        self._store, port = open_store(LOOPBACK)
        return self._info(0, 1, LOOPBACK, port)

    def _info(self, rank: int, num_machines: int, address: str, port: int) -> RendezvousInfo:
        place = RendezvousStoreInfo(address, port)
        return RendezvousInfo(cast(Store, self._store), rank, num_machines, place)

    def _poll(self) -> None:
        """Raise RunEnded if the run ended on another machine; called repeatedly while waiting."""

    def num_nodes_waiting(self) -> int:
        """Return 1 if all machines must restart their ranks, otherwise 0; raises RunEnded."""
        return 0

    def remote_failure(self) -> Failed | None:
        """Return the run's failure on another machine, if any; may be called at any time."""
        return None

    def restarts_after(self, describe: Callable[[], Failed | None]) -> bool:
        """Return whether machine 0 restarts all ranks after the failure that `describe` returns."""
        return False

    def are_all_done(self, describe_silent_exit: Callable[[], Failed | None]) -> bool:
        """Return whether all ranks on all machines succeeded.

        `describe_silent_exit` describes a rank of this machine that exited without a report.
        """
        return True

    def pause(self, seconds: float) -> None:
        """Wait; raises RunEnded if the run ends in the meantime."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._poll()
            time.sleep(min(left_s, CHECK_EVERY_S))

    def report_stop(self, number: int, *, ends_grace: bool) -> None:
        """Report a stop signal to the other machines; may be called from a signal handler."""

    def report_steps(self, rank: int, stats: StepStats) -> None:
        """Report the step times of a rank to machine 0; may be called from any thread."""

    def give_up(self, error: HeadwayError) -> None:
        """Report to the other machines that this machine cannot continue."""

    def rank_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the ranks' variables that depend on the network between machines."""
        return {}

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


def open_store(host: str) -> tuple[TCPStore, int]:
    """Start a store on `host`, or on all addresses if it is empty; return it and its port."""
    listener = listening_socket(host, 0)
    address, port = host or LOOPBACK, int(listener.getsockname()[1])
    try:
        store = TCPStore(
            address,
            port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )
    except DistError as error:
        raise LaunchError(
            f"torch's store on this machine does not answer: {host_port(address, port)}",
            where=f"torch's error: {str(error).splitlines()[0]}",
            fix="check the loopback interface (`ip address show lo`) and the limit on open files "
            "(`ulimit -n`)",
            code=Code.NO_CONNECTION,
        ) from None
    return store, port
