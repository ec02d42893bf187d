"""Write a launch of ours as a torchrun command line. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from headway.commands.exchange.torchrun_line import NAME, VARIABLES
from headway.launcher.planning.plan import LaunchPlan
from headway.machine.devices import ALL
from headway.settings.table import YES


def to_torchrun(plan: LaunchPlan, program: Sequence[str]) -> str:
    """Return the torchrun command line that runs `program` as `plan` does."""
    settings = plan.settings
    variables = [
        f"{name}={shlex.quote(f'{plan.environment[name].value}')}" for name in _variables_set(plan)
    ]
    words = ["torchrun"]
    if settings.num_machines == 1:
        words.append("--standalone")
    elif settings.num_machines.is_range:  # torchrun's static rendezvous has no ranges
        place = f"{settings.main_address}:{settings.main_port}"
        words += ["--nnodes", f"{settings.num_machines}"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place]
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
    return " ".join([*variables, shlex.join([*words, *program])])


_WITHOUT_FLAG = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_ENABLE_MPS_FALLBACK"),
    *(*VARIABLES, "ACCELERATE_USE_CPU"),
)
"""Variables for which torchrun has no flag; torch, Headway and Accelerate read them."""


def _variables_set(plan: LaunchPlan) -> list[str]:
    names = dict.fromkeys((*_WITHOUT_FLAG, *plan.settings.env))
    return [name for name in names if name in plan.environment and NAME.fullmatch(name)]


_EXPRESSED = (
    *("num_processes", "num_machines", "max_restarts", "log_dir", "grace_period_s"),
    *("mixed_precision", "gradient_accumulation_steps", "threads_per_process"),
)
"""Settings that a flag or a variable of the command line always carries over."""


def not_in_torchrun(plan: LaunchPlan, names: Sequence[str]) -> Iterator[str]:
    """Yield those of the settings `names` that a torchrun command line cannot express."""
    settings, variables = plan.settings, _variables_set(plan)
    masked = "CUDA_VISIBLE_DEVICES" in variables
    held = {  # a setting that is not named here is reported
        **dict.fromkeys(_EXPRESSED, True),
        "device": settings.device == "cpu" or masked,
        "devices": settings.devices == ALL or masked,
        "mps_fallback": "PYTORCH_ENABLE_MPS_FALLBACK" in variables,
        "ranks": plan.is_one_machine,  # torchrun's filter is by local rank
        "leave_children": settings.leave_children == YES,  # as torchrun does
        **dict.fromkeys(("start_method", "hang_timeout", "debug_rank"), False),
        **dict.fromkeys(("machine_rank", "main_address", "main_port"), not plan.is_one_machine),
    }
    for name in names:
        if name == "env":
            yield from (f"env.{key}" for key in settings.env if key not in variables)
        elif not held.get(name, False):
            yield name
