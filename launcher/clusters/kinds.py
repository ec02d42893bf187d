"""Defines a kind of cluster: how it is detected, and which variables provide its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from headway.errors import Code, Problem
from headway.ipc.numbering import Environ
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import Ranks
from headway.settings.profile import Entries, Entry

FIX = "pass --num-machines and --main-address, or --cluster none to run on this machine alone"
_FIRST_PORT, _NUM_PORTS = 20000, 12000


class ClusterKind(NamedTuple):
    """A kind of cluster.

    `derive` returns the settings that are computed from variables; entries with invalid values
    contain problems. `task` returns this process's rank if the cluster started every rank, and None
    if it started one launch per machine. Another package can add a kind through an entry point in
    the group `headway.clusters`. The entry point must have the kind's name.
    """

    name: str  # value of the setting `cluster`
    is_detected: Callable[[Environ], bool]  # whether this process runs on such a cluster
    variables: Mapping[str, str]  # names of variables, by setting
    derive: Callable[[Environ], Entries]
    task: Callable[[Environ], Ranks | None] = lambda _: None
    job_variable: str = ""  # the variable that contains the job's id
    overrides: tuple[str, ...] = ()  # kinds whose variables are ignored


def origin_of(variable: str, reason: str = "") -> Origin:
    return Origin(Layer.CLUSTER, variable=variable, reason=reason)


def entry_of(environ: Environ, variable: str) -> Entry:
    """Return the value of `variable` as a setting; raise KeyError if it is not set."""
    return Entry(environ[variable], origin_of(variable))


def invalid(variable: str, what: str, fix: str = FIX) -> Entries:
    problem = Problem(what, variable, fix, code=Code.BAD_VALUE, names=("num_machines",))
    return {"num_machines": Entry("1", origin_of(variable), problems=(problem,))}


def unreadable(variable: str, what: str, error: Exception) -> Entries:
    reason = f"{error.args[0]} is not set" if isinstance(error, KeyError) else error
    return invalid(variable, f"{what}: {reason}")


def port_from(text: str) -> str:
    """Derive a port below the ephemeral range from a string, such as a job id."""
    import zlib

    return str(_FIRST_PORT + zlib.crc32(text.encode()) % _NUM_PORTS)
