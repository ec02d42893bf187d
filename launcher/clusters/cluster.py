"""What a kind of cluster is, and what its variables say of a machine's place in the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from headway.contract.origin import Layer, Origin
from headway.contract.run import ALLOCATION_VARIABLE, JOB_VARIABLE, Ranks
from headway.contract.run import VARIABLE as RUN_VARIABLE
from headway.errors import Code, Problem
from headway.settings.profile import Entries, Entry
from headway.settings.resolve import NOTHING
from headway.settings.setting import AUTO
from headway.settings.table import NO_CLUSTER, TABLE, Settings

Environ = Mapping[str, str]
_FIRST_PORT, _NUM_PORTS = 20000, 12000


class Cluster(NamedTuple):
    """One kind of cluster.

    Args:
        name: the value of the setting `cluster` that means it.
        is_here: tells from the environment whether this process was started by such a cluster.
        variables: by the name of the setting, the variable that holds its value as it is.
        derive: returns the settings whose value no variable holds as it is; an entry whose value
            cannot be used says so in its faults.
        task: returns this process's place where the cluster has started each rank, not one
            process on each machine.
        hides: other clusters, whose variables mean something else beside this one's.
    """

    name: str
    is_here: Callable[[Environ], bool]
    variables: Mapping[str, str]
    derive: Callable[[Environ], Entries]
    task: Callable[[Environ], Ranks | None] = lambda _: None
    hides: tuple[str, ...] = ()


def said_by(variable: str, reason: str = "") -> Origin:
    """Return the origin of a value that a cluster's variable holds, or that is read from it."""
    return Origin(Layer.CLUSTER, variable=variable, reason=reason)


def faulty(name: str, text: str, variable: str, what: str, fix: str) -> Entry:
    """Return the entry of the setting `name` for a variable whose value cannot be used."""
    problem = Problem(what, variable, fix, code=Code.BAD_VALUE, names=(name,))
    return Entry(text, said_by(variable), faults=(problem,))


def port_from(text: str) -> str:
    """Return a port that all processes find which know the same text, such as a job's number.

    It is below the ports that the system gives out.
    """
    import zlib

    return str(_FIRST_PORT + zlib.crc32(text.encode()) % _NUM_PORTS)


SIGNS: tuple[str, ...] = (
    *("PET_", "OMPI_", "SLURM_", "JOB_COMPLETION_INDEX", "SKYPILOT_", "AWS_BATCH_", "SM_"),
    "RANK",
)
"""What names of clusters' variables begin with: without one of them no row has to be imported."""


def cluster_layer(environ: Mapping[str, str], layers: Sequence[Entries] = ()) -> Entries:
    """Return what the cluster in `environ` says, with the variables as origins.

    Args:
        environ: of a process that a cluster may have started. Inside of a rank, a launch is one of
            its own, and has no part in the run that the rank belongs to.
        layers: what a person has set, from the weakest: which cluster is meant.
    """
    wanted = _wanted(layers)
    if wanted == NO_CLUSTER or (wanted == AUTO and not _may_be_on_cluster(environ)):
        return NOTHING
    from headway.launcher.clusters.table import layer_of

    return layer_of(environ, wanted, any("num_machines" in layer for layer in layers))


def task_of(environ: Mapping[str, str], settings: Settings) -> Ranks | None:
    """Return this process's place where its cluster has started each rank by itself.

    Args:
        environ: in which the settings have been resolved without a problem.
        settings: of the launch. Whoever says which machine this is, has it started as one.
    """
    typed = any(settings.are_user_set(name) for name in ("num_machines", "machine_rank"))
    if typed or settings.cluster == NO_CLUSTER:
        return None
    from headway.launcher.clusters.table import CLUSTERS

    rows = {row.name: row for row in CLUSTERS}
    return rows[settings.cluster].task(environ)


def _may_be_on_cluster(environ: Mapping[str, str]) -> bool:
    return any(name.startswith(SIGNS) for name in environ) and not _is_inside_rank(environ)


def _is_inside_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a rank has started this process, and not another job that it has submitted."""
    job, _, _ = environ.get(ALLOCATION_VARIABLE, "").partition(":")
    return RUN_VARIABLE in environ and job == environ.get(JOB_VARIABLE, "")


def _wanted(layers: Sequence[Entries]) -> str:
    """Return the cluster that a person has named; an unknown name is reported elsewhere."""
    row = TABLE["cluster"]
    named = [layer["cluster"] for layer in layers if "cluster" in layer]
    return str(row.parse(named[-1].raw)) if named and row.reads(named[-1].raw) else AUTO
