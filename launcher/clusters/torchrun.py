"""torchrun's own variables, the defaults of its flags, which Kubeflow sets in each pod.

Source: torch/distributed/argparse_util.py; the environment of a PyTorchJob's and a TrainJob's pods.
"""

from __future__ import annotations

from headway.launcher.clusters.row import Cluster, Environ, said_by
from headway.settings.profile import Entries, Entry

_NNODES = "PET_NNODES"
_NPROC = "PET_NPROC_PER_NODE"
_ENDPOINT = "PET_RDZV_ENDPOINT"
_VARIABLES = {
    "machine_rank": "PET_NODE_RANK",
    "main_address": "PET_MASTER_ADDR",
    "main_port": "PET_MASTER_PORT",
}


def _is_here(environ: Environ) -> bool:
    return not environ.keys().isdisjoint((_NNODES, _NPROC, _ENDPOINT, *_VARIABLES.values()))


def _derive(environ: Environ) -> Entries:
    """Read PET_NPROC_PER_NODE and PET_NNODES; words such as auto mean what is detected anyway."""
    text = environ.get(_NPROC, "auto")
    is_detected = text in ("auto", "gpu", "cpu", "xpu")
    processes = {} if is_detected else {"num_processes": Entry(text, said_by(_NPROC))}
    return {**processes, **_machines(environ), **_endpoint(environ)}


def _machines(environ: Environ) -> Entries:
    text = environ.get(_NNODES)
    return {} if text is None else {"num_machines": Entry(text, said_by(_NNODES))}


def _endpoint(environ: Environ) -> Entries:
    """Read HOST:PORT, unless PET_MASTER_ADDR says the same."""
    if _VARIABLES["main_address"] in environ or not environ.get(_ENDPOINT):
        return {}
    host, colon, port = environ[_ENDPOINT].rpartition(":")
    entries = {"main_address": Entry(host if colon else port, said_by(_ENDPOINT))}
    return {**entries, "main_port": Entry(port, said_by(_ENDPOINT))} if colon else entries


TORCHRUN = Cluster("torchrun", _is_here, _VARIABLES, _derive, hides=("kubernetes",))
