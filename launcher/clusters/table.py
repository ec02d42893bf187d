"""Defines the table of cluster kinds, and reads settings from the detected cluster's variables.

The rows for SLURM and MPI are in `slurm.py` and `mpi.py`; all other rows are here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from headway.devices.table import OF_CLUSTERS, extensions
from headway.errors import Code, Problem
from headway.ipc.numbering import NUMBERINGS, PROCESS, UNKNOWN, Environ, Numbering
from headway.launcher.clusters.kinds import ClusterKind, entry_of, invalid, origin_of, unreadable
from headway.launcher.clusters.mpi import MPI
from headway.launcher.clusters.slurm import SLURM
from headway.settings.profile import Entries, Entry
from headway.settings.resolve import NOTHING
from headway.settings.setting import AUTO
from headway.settings.table import TABLE

_SKYPILOT = NUMBERINGS["skypilot"]
_INDEX = NUMBERINGS["kubernetes"].rank
_SKY_IPS, _SKY_GPUS = "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"
_PROCESSES = "NPROC_PER_NODE"


def _skypilot(environ: Environ) -> Entries:
    hosts = environ.get(_SKY_IPS, "").split()
    address = {"main_address": Entry(hosts[0], origin_of(_SKY_IPS))} if hosts else {}
    gpus = environ.get(_SKY_GPUS, "0")
    processes = {"num_processes": Entry(gpus, origin_of(_SKY_GPUS))} if gpus != "0" else {}
    return {**address, **processes}


def _ranked(environ: Environ) -> Entries:
    """Read RANK as the machine's rank if NPROC_PER_NODE is set; otherwise, RANK is ambiguous."""
    if _PROCESSES in environ:
        return {
            "num_machines": entry_of(environ, "WORLD_SIZE"),
            "machine_rank": entry_of(environ, "RANK"),
            "num_processes": entry_of(environ, _PROCESSES),
        }
    rank, size = environ["RANK"], environ["WORLD_SIZE"]
    what = (
        f"RANK is {rank!r} and WORLD_SIZE is {size!r}, but LOCAL_RANK is not set: "
        "RANK may number machines or processes"
    )
    fix = (
        f"if RANK numbers machines, pass --num-machines {size} --machine-rank {rank}; "
        "to run on this machine alone, pass --cluster none"
    )
    return invalid("RANK, WORLD_SIZE", what, fix)


def _lightning(environ: Environ) -> Entries:
    names = [name for name in (*LIGHTNING.variables.values(), "WORLD_SIZE") if name in environ]
    rank, address = environ["NODE_RANK"], environ.get("MASTER_ADDR", "HOST")
    what = f"NODE_RANK is {rank!r}, as in a run on several machines, but this launch would use one"
    fix = (
        f"pass --num-machines N --machine-rank {rank} --main-address {address}; to train on one, "
        f"`unset {' '.join(names)}`; if the script connects the machines, pass --cluster none"
    )
    return invalid(", ".join(f"{name}={environ[name]}" for name in names), what, fix)


SKYPILOT = ClusterKind(
    "skypilot",
    lambda environ: _SKYPILOT.size in environ,
    {"num_machines": _SKYPILOT.size, "machine_rank": _SKYPILOT.rank},
    _skypilot,
)
KUBERNETES = ClusterKind(  # the manifest also sets HEADWAY_NUM_MACHINES and the address
    "kubernetes", lambda environ: _INDEX in environ, {"machine_rank": _INDEX}, lambda _: {}
)
RANKED = ClusterKind(
    "ranked",
    lambda environ: NUMBERINGS["ranked"].count(environ) > 1,
    {"main_address": "MASTER_ADDR", "main_port": "MASTER_PORT"},
    _ranked,
)
LIGHTNING = ClusterKind(
    "lightning",
    lambda environ: NUMBERINGS["lightning"].count(environ) > 1,
    {"machine_rank": "NODE_RANK", "main_address": "MASTER_ADDR", "main_port": "MASTER_PORT"},
    _lightning,
)

_NPROC = "PET_NPROC_PER_NODE"
_DEVICES = {"gpu": "cuda", "cpu": "cpu", "xpu": "xpu"}
_ENDPOINT = "PET_RDZV_ENDPOINT"
_VARIABLES = {
    "machine_rank": NUMBERINGS["torchrun"].rank,
    "main_address": "PET_MASTER_ADDR",
    "main_port": "PET_MASTER_PORT",
    "num_machines": NUMBERINGS["torchrun"].size,
}


def _derive(environ: Environ) -> Entries:
    """Read torchrun's variables; its words for num_processes set the device, except `auto`."""
    text = environ.get(_NPROC, "auto")
    processes = {} if text == "auto" else {"num_processes": Entry(text, origin_of(_NPROC))}
    if text in _DEVICES:
        processes = {"device": Entry(_DEVICES[text], origin_of(_NPROC))}
        if text == "cpu":  # torchrun starts one process per core
            processes["num_processes"] = Entry(str(os.cpu_count()), origin_of(_NPROC))
    return {**processes, **_endpoint(environ)}


def _endpoint(environ: Environ) -> Entries:
    """Read HOST:PORT from PET_RDZV_ENDPOINT, unless PET_MASTER_ADDR is set."""
    if _VARIABLES["main_address"] in environ or not environ.get(_ENDPOINT):
        return {}
    host, colon, port = environ[_ENDPOINT].rpartition(":")
    entries = {"main_address": Entry(host if colon else port, origin_of(_ENDPOINT))}
    return {**entries, "main_port": Entry(port, origin_of(_ENDPOINT))} if colon else entries


TORCHRUN = ClusterKind(
    "torchrun",
    lambda environ: not environ.keys().isdisjoint((_NPROC, _ENDPOINT, *_VARIABLES.values())),
    _VARIABLES,
    _derive,
    overrides=("kubernetes",),
)

CLUSTERS: Sequence[ClusterKind] = (TORCHRUN, MPI, SLURM, KUBERNETES, SKYPILOT, RANKED, LIGHTNING)
"""All kinds of clusters; the first one that is detected is used."""

WITH_ONE_OUTPUT = (SLURM.name, MPI.name)
"""Clusters that collect the output of all machines of a run."""

_COMPARED = ("num_machines", "machine_rank")
"""Settings that must be equal in all clusters. Addresses may differ: a host can have many names."""


def layer_of(environ: Environ, wanted: str, sets_num_machines: bool) -> Entries:
    """Return the settings of the first matching row, with the variables as origins.

    `wanted` is the user's `cluster` setting, or `auto`; `sets_num_machines` is true if the user
    set num_machines.
    """
    rows = CLUSTERS if wanted == AUTO else [row_of(wanted)]
    here = [row for row in rows if row.is_detected(environ)]
    if wanted == AUTO and (refused := _refused(environ)):
        return refused
    if not here:
        return NOTHING if wanted == AUTO else {"cluster": _missing(wanted)}
    first = here[0]
    entries = _entries(first, environ)
    is_number = entries.keys() == {"machine_rank"}  # every pod of an indexed Job has this variable
    if not entries or (is_number and not sets_num_machines):
        return NOTHING
    for row in here[1:]:
        if row.name not in (*first.overrides, RANKED.name, LIGHTNING.name):
            entries |= _conflicts(entries, _entries(row, environ))
    return {**entries, "cluster": Entry(first.name, next(iter(entries.values())).origin)}


def row_of(name: str) -> ClusterKind:
    """Return the row `name`, which another package may define; raises KeyError if there is none."""
    rows = {row.name: row for row in CLUSTERS}
    if name in rows:
        return rows[name]
    row: ClusterKind = extensions(OF_CLUSTERS)[name].load()
    return row


def _refused(environ: Environ) -> Entries:
    """Return an error if an unsupported launcher uses more than one machine or process."""
    supported = [cluster.name for cluster in CLUSTERS]
    for name, row in NUMBERINGS.items():
        try:
            count = row.count(environ)
        except OSError as error:
            return unreadable(row.size, f"{row.source}'s hostfile cannot be read", error)
        if count == UNKNOWN and name != TORCHRUN.name:  # TORCHRUN reports it
            return invalid(row.size, f"{row.size} is {environ[row.size]!r}, not a whole number")
        if count > 1:
            return {} if name in supported else _unsupported(row, count, environ)
    return {}


def _unsupported(row: Numbering, count: int, environ: Environ) -> Entries:
    if not row.rank:
        hosts = ",".join(row.hostnames(environ))
        what = f"this {row.source} job has {count} machines, but this launch would use only one"
        return invalid(row.size, what, f"pass --hosts {hosts}, or --num-machines 1 to use only one")
    number = environ.get(row.rank)
    which = f"one of {count} {row.unit}s" if number is None else f"{row.unit} {number} of {count}"
    what = f"{row.source} started this launch as {which}, but Headway cannot join its run"
    fix = "start one launch on each machine, with --num-machines and --main-address"
    if row.unit == PROCESS:
        fix = f"do not use {row.source.split()[0]}: pass --hosts a,b, or {fix}"
    fix += "; to run on this machine alone, pass --cluster none"
    return invalid(f"{row.size}, {row.rank}", what, fix)


def _entries(cluster: ClusterKind, environ: Environ) -> dict[str, Entry]:
    plain = {
        setting: entry_of(environ, variable)
        for setting, variable in cluster.variables.items()
        if variable in environ
    }
    return {**plain, **cluster.derive(environ)}


def _missing(name: str) -> Entry:
    problem = Problem(
        f"cluster is {name!r}, but none of its variables is set",
        "the environment of this process",
        f"start the launch inside a job, or omit {TABLE['cluster'].flag}",
        code=Code.NO_CLUSTER,
        names=("cluster",),
    )
    return Entry(name, origin_of(""), problems=(problem,))


def _conflicts(entries: Entries, others: Entries) -> Iterator[tuple[str, Entry]]:
    """Yield the entries that another cluster contradicts, each with a problem."""
    for name in entries.keys() & others.keys() & {*_COMPARED}:
        one, other = entries[name], others[name]
        if one.problems or other.problems or one.raw == other.raw:
            continue
        problem = Problem(
            f"{name} is {one.raw!r} according to {one.origin.variable}, "
            f"but {other.raw!r} according to {other.origin.variable}",
            f"{one.origin.variable}; {other.origin.variable}",
            f"unset the wrong variable, pass {TABLE[name].flag}, or name the cluster with "
            f"{TABLE['cluster'].flag}",
            code=Code.CLUSTERS_DISAGREE,
            names=(name,),
        )
        yield name, one._replace(problems=(problem,))
