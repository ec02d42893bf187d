"""What a cluster's variables say of a machine's place in the run: one row for each kind of cluster.

The row that fits the environment gives one layer of settings, weaker than all that a person sets:
it answers only for settings that are left to `auto`. Pure: no torch, nothing is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from headway.contract.origin import Layer, Origin
from headway.errors import Code, Problem
from headway.settings.profile import Entries, Entry

Environ = Mapping[str, str]


class Cluster(NamedTuple):
    """One kind of cluster: how it is recognised, and where it says what.

    Args:
        name: for people.
        is_here: tells from the environment whether this process was started by such a cluster.
        variables: by the name of the setting, the variable that holds its value as it is.
        derive: returns the settings whose value no variable holds as it is; an entry whose value
            cannot be used says so in its faults.
    """

    name: str
    is_here: Callable[[Environ], bool]
    variables: Mapping[str, str]
    derive: Callable[[Environ], Entries]


def cluster_layer(environ: Environ) -> Entries:
    """Return what the first row that fits `environ` says, with the variables as origins."""
    cluster = next(row for row in CLUSTERS if row.is_here(environ))
    plain = {
        setting: Entry(environ[variable], said_by(variable))
        for setting, variable in cluster.variables.items()
        if variable in environ
    }
    return {**plain, **cluster.derive(environ)}


def said_by(variable: str) -> Origin:
    """Return the origin of a value that a cluster's variable holds."""
    return Origin(Layer.CLUSTER, variable=variable)


_NNODES = "PET_NNODES"
_NPROC = "PET_NPROC_PER_NODE"
_TORCHRUN_VARIABLES = {
    "machine_rank": "PET_NODE_RANK",
    "main_address": "PET_MASTER_ADDR",
    "main_port": "PET_MASTER_PORT",
}


def _is_set_up_for_torchrun(environ: Environ) -> bool:
    return not environ.keys().isdisjoint((_NNODES, _NPROC, *_TORCHRUN_VARIABLES.values()))


def _torchrun_counts(environ: Environ) -> Entries:
    """Read PET_NPROC_PER_NODE and PET_NNODES; words such as auto mean what is detected anyway."""
    text = environ.get(_NPROC, "auto")
    is_detected = text in ("auto", "gpu", "cpu", "xpu")
    processes = {} if is_detected else {"num_processes": Entry(text, said_by(_NPROC))}
    return {**processes, **_torchrun_machines(environ)}


def _torchrun_machines(environ: Environ) -> Entries:
    """Read PET_NNODES, which may be a range: 2:2 is 2, and 1:4 would change during the run."""
    text = environ.get(_NNODES)
    if text is None:
        return {}
    least, colon, most = (part.strip() for part in text.partition(":"))
    faults: tuple[Problem, ...] = ()
    if colon and least != most:
        what = f"{_NNODES} is {text!r}, but the number of machines cannot change during a run"
        fix = f"set {_NNODES} to one number, or pass --num-machines M, which replaces it"
        faults = (Problem(what, _NNODES, fix, code=Code.BAD_VALUE, names=("num_machines",)),)
    return {"num_machines": Entry(least if colon else text, said_by(_NNODES), faults=faults)}


CLUSTERS = (
    # read by torchrun as defaults of its flags; Kubeflow's training operator sets them in each pod
    Cluster("torchrun", _is_set_up_for_torchrun, _TORCHRUN_VARIABLES, _torchrun_counts),
    # no cluster: what is not one machine is said by hand, in a profile, variables or flags
    Cluster("none", lambda _: True, {}, lambda _: {}),
)
"""The first row that is here speaks, so the last one always is."""
