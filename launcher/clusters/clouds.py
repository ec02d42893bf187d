"""What Kubernetes, SkyPilot, AWS Batch, SageMaker, Alibaba's PAI and torchrun say of a place."""

from __future__ import annotations

from headway.launcher.clusters.row import Cluster, Environ, faulty, said_by
from headway.settings.profile import Entries, Entry

_BATCH_RANK, _BATCH_MAIN = "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_MAIN_NODE_INDEX"
_BATCH_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
_SKY_IPS, _SKY_GPUS = "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"
_SM_HOSTS, _SM_HOST = "SM_HOSTS", "SM_CURRENT_HOST"
_PROCESSES = "NPROC_PER_NODE"


def _skypilot(environ: Environ) -> Entries:
    hosts = environ.get(_SKY_IPS, "").split()
    address = {"main_address": Entry(hosts[0], said_by(_SKY_IPS))} if hosts else {}
    gpus = environ.get(_SKY_GPUS, "0")
    processes = {"num_processes": Entry(gpus, said_by(_SKY_GPUS))} if gpus != "0" else {}
    return {**address, **processes}


def _batch(environ: Environ) -> Entries:
    """Count from the main node, which need not have index 0, and is not told its own address."""
    index, main = environ.get(_BATCH_RANK, ""), environ.get(_BATCH_MAIN, "0")
    if not (index.isdecimal() and main.isdecimal()):
        what = f"{_BATCH_RANK} is {index!r} and {_BATCH_MAIN} is {main!r}: no numbers of machines"
        return {"machine_rank": faulty("machine_rank", index, _BATCH_RANK, what)}
    rank = 0 if index == main else int(index) + (int(index) < int(main))
    entries = {"machine_rank": Entry(str(rank), said_by(_BATCH_RANK))}
    if rank == 0:
        import socket

        own = said_by(_BATCH_RANK, "this is the main node")
        return {**entries, "main_address": Entry(socket.gethostname(), own)}
    return entries


def _sagemaker(environ: Environ) -> Entries:
    import json

    try:
        hosts = sorted(json.loads(environ[_SM_HOSTS]))
        rank = hosts.index(environ[_SM_HOST])
    except (ValueError, KeyError, TypeError):
        what = f"{_SM_HOSTS} is {environ[_SM_HOSTS]!r}, in which {_SM_HOST} is not named"
        return {"num_machines": faulty("num_machines", "1", _SM_HOSTS, what)}
    return {
        "num_machines": Entry(str(len(hosts)), said_by(_SM_HOSTS)),
        "machine_rank": Entry(str(rank), said_by(_SM_HOSTS)),
        "main_address": Entry(hosts[0], said_by(_SM_HOSTS)),
    }


def _is_ranked(environ: Environ) -> bool:
    """Return whether somebody has numbered this process, and not said whether as one of a machine.

    torchrun and its like, and hooks of containers, set LOCAL_RANK too.
    """
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
    return {"num_machines": faulty("num_machines", "1", "RANK, WORLD_SIZE", what, fix)}


SKYPILOT = Cluster(
    "skypilot",
    lambda environ: "SKYPILOT_NUM_NODES" in environ,
    {"num_machines": "SKYPILOT_NUM_NODES", "machine_rank": "SKYPILOT_NODE_RANK"},
    _skypilot,
)
AWS_BATCH = Cluster(
    "aws-batch",
    lambda environ: "AWS_BATCH_JOB_NUM_NODES" in environ,
    {"num_machines": "AWS_BATCH_JOB_NUM_NODES", "main_address": _BATCH_ADDRESS},
    _batch,
)
SAGEMAKER = Cluster("sagemaker", lambda environ: _SM_HOSTS in environ, {}, _sagemaker)
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
