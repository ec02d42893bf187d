"""A machine's place in a run by the variables of Kubernetes, SkyPilot, Alibaba's PAI, torchrun."""

from __future__ import annotations

from headway.contract.numbering import NUMBERINGS
from headway.launcher.clusters.row import Cluster, Environ, faulty, said_by
from headway.settings.profile import Entries, Entry

_SKYPILOT = NUMBERINGS["skypilot"]
_INDEX = NUMBERINGS["kubernetes"].rank
_SKY_IPS, _SKY_GPUS = "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"
_PROCESSES = "NPROC_PER_NODE"


def _skypilot(environ: Environ) -> Entries:
    hosts = environ.get(_SKY_IPS, "").split()
    address = {"main_address": Entry(hosts[0], said_by(_SKY_IPS))} if hosts else {}
    gpus = environ.get(_SKY_GPUS, "0")
    processes = {"num_processes": Entry(gpus, said_by(_SKY_GPUS))} if gpus != "0" else {}
    return {**address, **processes}


def _ranked(environ: Environ) -> Entries:
    """Read RANK as a machine's where NPROC_PER_NODE says so; otherwise it may be a process's."""
    if _PROCESSES in environ:
        return {
            "num_machines": Entry(environ["WORLD_SIZE"], said_by("WORLD_SIZE")),
            "machine_rank": Entry(environ["RANK"], said_by("RANK")),
            "num_processes": Entry(environ[_PROCESSES], said_by(_PROCESSES)),
        }
    rank, size = environ["RANK"], environ["WORLD_SIZE"]
    what = (
        f"RANK is {rank!r} and WORLD_SIZE {size!r} without LOCAL_RANK: "
        "they may number machines or processes"
    )
    fix = (
        f"pass --num-machines {size} --machine-rank {rank} if they number machines; "
        "--cluster none for a run on this machine alone"
    )
    return faulty("RANK, WORLD_SIZE", what, fix)


SKYPILOT = Cluster(
    "skypilot",
    lambda environ: _SKYPILOT.size in environ,
    {"num_machines": _SKYPILOT.size, "machine_rank": _SKYPILOT.rank},
    _skypilot,
)
KUBERNETES = Cluster(  # the number and the address are in the manifest, as HEADWAY_*
    "kubernetes",
    lambda environ: _INDEX in environ,
    {"machine_rank": _INDEX},
    lambda _: {},
)
RANKED = Cluster(
    "ranked",
    lambda environ: NUMBERINGS["ranked"].count(environ) > 1,
    {"main_address": "MASTER_ADDR", "main_port": "MASTER_PORT"},
    _ranked,
)


_NNODES = NUMBERINGS["torchrun"].size
_NPROC = "PET_NPROC_PER_NODE"
_ENDPOINT = "PET_RDZV_ENDPOINT"
_VARIABLES = {
    "machine_rank": NUMBERINGS["torchrun"].rank,
    "main_address": "PET_MASTER_ADDR",
    "main_port": "PET_MASTER_PORT",
}


def _derive(environ: Environ) -> Entries:
    """Read PET_NPROC_PER_NODE and PET_NNODES; words such as auto mean what is detected anyway."""
    text = environ.get(_NPROC, "auto")
    is_detected = text in ("auto", "gpu", "cpu", "xpu")
    processes = {} if is_detected else {"num_processes": Entry(text, said_by(_NPROC))}
    nodes = environ.get(_NNODES)
    machines = {} if nodes is None else {"num_machines": Entry(nodes, said_by(_NNODES))}
    return {**processes, **machines, **_endpoint(environ)}


def _endpoint(environ: Environ) -> Entries:
    """Read HOST:PORT, unless PET_MASTER_ADDR says the same."""
    if _VARIABLES["main_address"] in environ or not environ.get(_ENDPOINT):
        return {}
    host, colon, port = environ[_ENDPOINT].rpartition(":")
    entries = {"main_address": Entry(host if colon else port, said_by(_ENDPOINT))}
    return {**entries, "main_port": Entry(port, said_by(_ENDPOINT))} if colon else entries


TORCHRUN = Cluster(
    "torchrun",
    lambda environ: (
        not environ.keys().isdisjoint((_NNODES, _NPROC, _ENDPOINT, *_VARIABLES.values()))
    ),
    _VARIABLES,
    _derive,
    hides=("kubernetes",),
)
