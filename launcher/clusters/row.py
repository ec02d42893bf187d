"""What a kind of cluster is: how it is recognised, and where it says what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from headway.errors import Code, Problem
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import Ranks
from headway.settings.profile import Entries, Entry

Environ = Mapping[str, str]
FIX = "pass --num-machines and --main-address, or --cluster none for a run on this machine alone"
_FIRST_PORT, _NUM_PORTS = 20000, 12000


class Cluster(NamedTuple):
    """One kind of cluster.

    `derive` returns the settings whose value no variable holds as it is; an entry that cannot be
    used says so in its faults. `task` returns this process's place where the cluster has started
    each rank, not one process on each machine. Another package adds a row by an
    entry point of the group `headway.clusters`, whose name is the row's.
    """

    name: str  # the value of the setting `cluster` that means it
    is_here: Callable[[Environ], bool]  # whether such a cluster has started this process
    variables: Mapping[str, str]  # by settings' names, those that hold the value as it is
    derive: Callable[[Environ], Entries]
    task: Callable[[Environ], Ranks | None] = lambda _: None
    job_variable: str = ""  # holds the id of the scheduler's job
    hides: tuple[str, ...] = ()  # clusters whose variables mean something else beside this one's


def origin_of(variable: str, reason: str = "") -> Origin:
    return Origin(Layer.CLUSTER, variable=variable, reason=reason)


def faulty(variable: str, what: str, fix: str = FIX) -> Entries:
    problem = Problem(what, variable, fix, code=Code.BAD_VALUE, names=("num_machines",))
    return {"num_machines": Entry("1", origin_of(variable), faults=(problem,))}


def unreadable(variable: str, what: str, error: Exception) -> Entries:
    reason = f"{error.args[0]} is not set" if isinstance(error, KeyError) else error
    return faulty(variable, f"{what}: {reason}")


def port_from(text: str) -> str:
    """Return a port for a text, such as a job's number, below the system's ephemeral ports."""
    import zlib

    return str(_FIRST_PORT + zlib.crc32(text.encode()) % _NUM_PORTS)
