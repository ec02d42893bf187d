"""A launch of ours as a torchrun command line. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from headway.commands.torchrun_line import VARIABLES
from headway.launcher.plan import LaunchPlan


def to_torchrun(plan: LaunchPlan, program: Sequence[str]) -> str:
    """Return the command line by which torchrun runs `program` as `plan` does."""
    settings = plan.settings
    names = dict.fromkeys((*_READ_BY_SCRIPTS, *settings.env))
    words = [f"{name}={plan.environment[name].value}" for name in names if name in plan.environment]
    words.append("torchrun")
    if settings.num_machines == 1:
        words.append("--standalone")
    else:
        words += ["--nnodes", f"{settings.num_machines}", "--node-rank", f"{settings.machine_rank}"]
        words += ["--master-addr", f"{settings.main_address}"]
        words += ["--master-port", f"{settings.main_port}"]
    words += ["--nproc-per-node", f"{settings.num_processes}"]
    words += ["--shutdown-timeout", f"{settings.grace_period_s}"]
    if settings.max_restarts:
        words += ["--max-restarts", f"{settings.max_restarts}"]
    if settings.log_dir:
        words += ["--log-dir", settings.log_dir, "--tee", "3"]
    if settings.ranks is not None and settings.num_machines == 1:
        words += ["--local-ranks-filter", ",".join(map(str, settings.ranks))]
    return shlex.join([*words, *program])


_READ_BY_SCRIPTS = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_ENABLE_MPS_FALLBACK"),
    *(*VARIABLES, "ACCELERATE_USE_CPU"),
)
"""What torchrun has no flag for; torch, and scripts of Headway and Accelerate read it."""


def in_torchrun(plan: LaunchPlan, name: str) -> bool:
    """Return whether a torchrun command line can hold the setting `name`."""
    if name == "ranks":  # its ranks are those of one machine
        return plan.is_one_machine
    return name not in ("start_method", "hang_timeout", "debug_rank")
