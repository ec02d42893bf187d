"""What a cluster's variables say of a machine's place in the run.

The row of `table.py` that fits the environment gives one layer of settings, weaker than all that a
person sets: it answers only for settings that are left to `auto`. No torch, nothing is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.ipc.run_contract import ALLOCATION_VARIABLE, JOB_VARIABLE, Ranks
from headway.ipc.run_contract import VARIABLE as RUN_VARIABLE
from headway.settings.profile import Entries
from headway.settings.resolve import NOTHING
from headway.settings.setting import AUTO
from headway.settings.table import NO_CLUSTER, TABLE, Settings

SIGNS = (
    *("PET_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "JSM_NAMESPACE_", "FLUX_", "SLURM_"),
    *("SKYPILOT_", "WORLD_", "RANK", "JOB_COMPLETION_", "AWS_BATCH_JOB_", "SM_", "PBS_", "LSB_"),
)
"""Prefixes of the variables in NUMBERINGS: without one of them neither it nor a row is imported."""


def cluster_layer(environ: Mapping[str, str], layers: Sequence[Entries] = ()) -> Entries:
    """Return the settings that the cluster in `environ` holds, with its variables as origins.

    `layers`, the user's settings from the weakest on, name the cluster. A launch inside a rank is
    no part of that rank's run.
    """
    wanted = _wanted(layers)
    may_be_on_one = any(name.startswith(SIGNS) for name in environ) and not _is_inside_rank(environ)
    if wanted == NO_CLUSTER or (wanted == AUTO and not may_be_on_one):
        return NOTHING
    from headway.launcher.clusters.table import layer_of

    return layer_of(environ, wanted, any("num_machines" in layer for layer in layers))


def assigned_rank(environ: Mapping[str, str], settings: Settings) -> Ranks | None:
    """Return this process's place where its cluster has started each rank by itself.

    Where the user has set which machine this is, the cluster has started one launch per machine.
    """
    typed = any(settings.are_user_set(name) for name in ("num_machines", "machine_rank"))
    if typed or settings.cluster == NO_CLUSTER:
        return None
    from headway.launcher.clusters.table import row_of

    return row_of(settings.cluster).task(environ)


def job_in(environ: Mapping[str, str], settings: Settings) -> str:
    """Return the id of the scheduler's job that this process runs in; empty outside of one."""
    if JOB_VARIABLE in environ or settings.cluster == NO_CLUSTER:
        return environ.get(JOB_VARIABLE, "")
    from headway.launcher.clusters.table import row_of

    return environ.get(row_of(settings.cluster).job_variable, "")


def _is_inside_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a rank has started this process, and not another job that it has submitted."""
    job, _, _ = environ.get(ALLOCATION_VARIABLE, "").partition(":")
    return RUN_VARIABLE in environ and job == environ.get(JOB_VARIABLE, "")


def _wanted(layers: Sequence[Entries]) -> str:
    """Return the cluster that a person has named; an unknown name is reported elsewhere."""
    row = TABLE["cluster"]
    named = [layer["cluster"] for layer in layers if "cluster" in layer]
    return str(row.parse(named[-1].raw)) if named and row.reads(named[-1].raw) else AUTO
