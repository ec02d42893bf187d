"""Reads this process's settings, rank and job id from a cluster's environment variables.

The first row of `table.py` that matches the environment provides a layer of settings. Values set by
the user override this layer. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.ipc.run_contract import ALLOCATION_VARIABLE, JOB_VARIABLE, Ranks
from headway.ipc.run_contract import VARIABLE as RUN_VARIABLE
from headway.settings.profile import Entries
from headway.settings.resolve import NOTHING
from headway.settings.setting import AUTO
from headway.settings.table import NO_CLUSTER, TABLE, Settings

PREFIXES = (
    *("PET_", "OMPI_COMM_", "MV2_COMM_", "PMI_", "JSM_", "FLUX_", "SLURM_", "SUBMITIT_", "SM_"),
    *("SKYPILOT_", "WORLD_", "RANK", "NODE_RANK", "JOB_COMPLETION_", "AWS_BATCH_", "PBS_", "LSB_"),
    *("PE_HOSTFILE", "OAR_", "COBALT_", "_CONDOR_", "BATCH_HOSTS", "AZ_BATCH_", "VC_", "LWS_"),
)
"""Prefixes of the variables in NUMBERINGS; `table.py` is imported only if one of them is set."""


def cluster_layer(environ: Mapping[str, str], layers: Sequence[Entries] = ()) -> Entries:
    """Return the settings from the cluster's variables in `environ`, with the variables as origins.

    `layers` are the user's settings, in ascending precedence; they may set `cluster`. If they do
    not, a launch inside a rank gets no settings, because it is not part of that rank's run.
    """
    wanted = _wanted(layers)
    has_variables = any(name.startswith(PREFIXES) for name in environ) and not _is_in_rank(environ)
    if wanted == NO_CLUSTER or (wanted == AUTO and not has_variables):
        return NOTHING
    from headway.launcher.clusters.table import layer_of

    return layer_of(environ, wanted, any("num_machines" in layer for layer in layers))


def assigned_rank(environ: Mapping[str, str], settings: Settings) -> Ranks | None:
    """Return this process's rank if the cluster started each rank itself; None if it did not.

    If the user sets num_machines or machine_rank, each process is one machine's launch, not a rank.
    """
    is_per_machine = any(settings.are_user_set(name) for name in ("num_machines", "machine_rank"))
    if is_per_machine or settings.cluster == NO_CLUSTER:
        return None
    from headway.launcher.clusters.table import row_of

    return row_of(settings.cluster).task(environ)


def job_in(environ: Mapping[str, str], settings: Settings) -> str:
    """Return the id of this process's scheduler job; empty outside a job."""
    if JOB_VARIABLE in environ or settings.cluster == NO_CLUSTER:
        return environ.get(JOB_VARIABLE, "")
    from headway.launcher.clusters.table import row_of

    return environ.get(row_of(settings.cluster).job_variable, "")


def _is_in_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a rank of the same job started this process."""
    job, _, _ = environ.get(ALLOCATION_VARIABLE, "").partition(":")
    return RUN_VARIABLE in environ and job == environ.get(JOB_VARIABLE, "")


def _wanted(layers: Sequence[Entries]) -> str:
    """Return the user's `cluster` setting, or `auto` if the setting is missing or invalid."""
    row = TABLE["cluster"]
    named = [layer["cluster"] for layer in layers if "cluster" in layer]
    return str(row.parse(named[-1].raw)) if named and row.accepts(named[-1].raw) else AUTO
