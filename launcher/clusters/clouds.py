"""A machine's place in a run by the variables of Kubernetes, SkyPilot, Alibaba's PAI, torchrun."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.launcher.clusters.row import Cluster, Environ, faulty, said_by
from headway.settings.profile import Entries, Entry

_SKY_IPS, _SKY_GPUS = "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"
_PROCESSES = "NPROC_PER_NODE"


def _skypilot(environ: Environ) -> Entries:
    hosts = environ.get(_SKY_IPS, "").split()
    address = {"main_address": Entry(hosts[0], said_by(_SKY_IPS))} if hosts else {}
    gpus = environ.get(_SKY_GPUS, "0")
    processes = {"num_processes": Entry(gpus, said_by(_SKY_GPUS))} if gpus != "0" else {}
    return {**address, **processes}


def _is_ranked(environ: Environ) -> bool:
    """Return whether RANK is set without LOCAL_RANK, which torchrun and containers' hooks set."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    is_numbered = all(name in environ for name in names) and environ["WORLD_SIZE"] != "1"
    return is_numbered and "LOCAL_RANK" not in environ


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
    lambda environ: "SKYPILOT_NUM_NODES" in environ,
    {"num_machines": "SKYPILOT_NUM_NODES", "machine_rank": "SKYPILOT_NODE_RANK"},
    _skypilot,
)
KUBERNETES = Cluster(  # the number and the address are in the manifest, as HEADWAY_*
    "kubernetes",
    lambda environ: "JOB_COMPLETION_INDEX" in environ,
    {"machine_rank": "JOB_COMPLETION_INDEX"},
    lambda _: {},
)
RANKED = Cluster(
    "ranked", _is_ranked, {"main_address": "MASTER_ADDR", "main_port": "MASTER_PORT"}, _ranked
)


_NNODES = "PET_NNODES"
_NPROC = "PET_NPROC_PER_NODE"
_ENDPOINT = "PET_RDZV_ENDPOINT"
_VARIABLES = {
    "machine_rank": "PET_NODE_RANK",
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


def refused(environ: Environ) -> Entries:
    """Return an error for variables of several machines that are known, but not supported."""
    for variable, (service, is_several) in _UNSUPPORTED.items():
        if is_several(environ.get(variable, "")):
            what = f"{service}'s {variable} names several machines: it is not supported"
            return faulty(variable, what)
    return {}


_UNSUPPORTED: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "AWS_BATCH_JOB_NUM_NODES": ("AWS Batch", lambda text: text not in ("", "1")),
    "SM_HOSTS": ("SageMaker", lambda text: "," in text),  # a JSON list of names
}
