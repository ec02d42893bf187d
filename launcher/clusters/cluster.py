"""What a cluster's variables say of a machine's place in the run: one row for each kind of cluster.

The row that fits the environment gives one layer of settings, weaker than all that a person sets:
it answers only for settings that are left to `auto`. No torch, nothing is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.contract.run import ALLOCATION_VARIABLE, JOB_VARIABLE, Ranks
from headway.contract.run import VARIABLE as RUN_VARIABLE
from headway.errors import Code, Problem
from headway.launcher.clusters.clouds import AWS_BATCH, KUBERNETES, RANKED, SAGEMAKER, SKYPILOT
from headway.launcher.clusters.mpi import MPI
from headway.launcher.clusters.row import Cluster, Environ, said_by
from headway.launcher.clusters.slurm import SLURM
from headway.launcher.clusters.torchrun import TORCHRUN
from headway.settings.profile import Entries, Entry
from headway.settings.resolve import NOTHING
from headway.settings.setting import AUTO
from headway.settings.table import NO_CLUSTER, TABLE, Settings

CLUSTERS: Sequence[Cluster] = (
    *(TORCHRUN, MPI, SLURM, KUBERNETES, SKYPILOT, AWS_BATCH, SAGEMAKER),
    RANKED,
)
"""The first row that is here speaks."""

_PLACE = ("num_machines", "machine_rank", "main_address")


def cluster_layer(environ: Environ, layers: Sequence[Entries] = ()) -> Entries:
    """Return what the cluster in `environ` says, with the variables as origins.

    Args:
        environ: of a process that a cluster may have started. Inside of a rank, a launch is one of
            its own, and has no part in the run that the rank belongs to.
        layers: what a person has set, from the weakest: which cluster is meant.
    """
    wanted = _wanted(layers)
    if wanted == NO_CLUSTER or (wanted == AUTO and _is_inside_rank(environ)):
        return NOTHING
    here = [row for row in CLUSTERS if row.is_here(environ)]
    if wanted != AUTO:
        here = [row for row in here if row.name == wanted]
        if not here:
            return {"cluster": _missing(wanted)}
    if not here:
        return NOTHING
    first = here[0]
    entries = _entries(first, environ)
    is_typed = any("num_machines" in layer for layer in layers)
    is_number = entries.keys() == {"machine_rank"}  # which any job has
    if not entries or (is_number and not is_typed):
        return NOTHING
    others = [row for row in here[1:] if row.name not in (*first.hides, RANKED.name)]
    for row in others:
        entries |= _disagreeing(entries, _entries(row, environ))
    seen_by = next(iter(entries.values())).origin
    return {**entries, "cluster": Entry(first.name, seen_by)}


def task_of(environ: Environ, settings: Settings) -> Ranks | None:
    """Return this process's place where its cluster has started each rank by itself.

    Args:
        environ: in which the settings have been resolved without a problem.
        settings: of the launch. Whoever says which machine this is, has it started as one.
    """
    typed = [name for name in ("num_machines", "machine_rank") if settings.are_user_set(name)]
    rows = [row for row in CLUSTERS if row.name == settings.cluster]
    return rows[0].task(environ) if rows and not typed else None


def _is_inside_rank(environ: Environ) -> bool:
    """Return whether a rank has started this process, and not another job that it has submitted."""
    job, _, _ = environ.get(ALLOCATION_VARIABLE, "").partition(":")
    return RUN_VARIABLE in environ and job == environ.get(JOB_VARIABLE, "")


def _wanted(layers: Sequence[Entries]) -> str:
    """Return the cluster that a person has named; an unknown name is reported elsewhere."""
    row = TABLE["cluster"]
    named = [layer["cluster"] for layer in layers if "cluster" in layer]
    return str(row.parse(named[-1].raw)) if named and row.reads(named[-1].raw) else AUTO


def _entries(cluster: Cluster, environ: Environ) -> dict[str, Entry]:
    plain = {
        setting: Entry(environ[variable], said_by(variable))
        for setting, variable in cluster.variables.items()
        if variable in environ
    }
    return {**plain, **cluster.derive(environ)}


def _missing(name: str) -> Entry:
    problem = Problem(
        f"cluster is {name!r}, but this process has none of its variables",
        "the environment of this process",
        f"start it inside of a job, or leave {TABLE['cluster'].flag} out",
        code=Code.NO_CLUSTER,
        names=("cluster",),
    )
    return Entry(name, said_by(""), faults=(problem,))


def _disagreeing(entries: Entries, others: Entries) -> Iterator[tuple[str, Entry]]:
    """Yield the entries of the machine's place of which another cluster says something else."""
    for name in entries.keys() & others.keys() & {*_PLACE}:
        one, other = entries[name], others[name]
        if one.faults or other.faults or _are_same(str(one.raw), str(other.raw)):
            continue
        problem = Problem(
            f"{name} is {one.raw!r} by {one.origin.variable}, "
            f"but {other.raw!r} by {other.origin.variable}",
            f"{one.origin.variable}; {other.origin.variable}",
            f"unset the wrong one; or pass {TABLE[name].flag}, or {TABLE['cluster'].flag} with the "
            "one that is meant",
            code=Code.CLUSTERS_DISAGREE,
            names=(name,),
        )
        yield name, one._replace(faults=(problem,))


def _are_same(one: str, other: str) -> bool:
    """Return whether two values may mean the same: n1 and n1.cluster.org, a name and an address."""
    if one == other:
        return True
    if one.isdecimal() or other.isdecimal():
        return False
    are_addresses = [":" in text or text.replace(".", "").isdecimal() for text in (one, other)]
    if any(are_addresses):
        return not all(are_addresses)
    return one.partition(".")[0] == other.partition(".")[0]
