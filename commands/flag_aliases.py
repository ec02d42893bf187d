"""Flags of torchrun, `accelerate launch` and others that are not ours: what each is here."""

from __future__ import annotations

from headway.settings.table import TABLE

_RENAMED = {  # flags of other tools, and the setting that each is
    "--node-rank": "machine_rank",
    "--master-addr": "main_address",
    "--master-port": "main_port",
    "--local-ranks-filter": "ranks",
    "--main-process-ip": "main_address",
    "--main-process-port": "main_port",
    "--accelerator": "device",
    "--precision": "mixed_precision",
    "--accumulate-grad-batches": "gradient_accumulation_steps",
    **dict.fromkeys(("--nproc-per-node", "--nproc", "--np", "-np", "-n"), "num_processes"),
    **dict.fromkeys(("--nnodes", "--num-nodes", "--nodes"), "num_machines"),
    **dict.fromkeys(("--gpu-ids", "--gpus", "--num-gpus"), "devices"),
    **dict.fromkeys(("--redirects", "-r", "--tee", "-t"), "log_dir"),
    "--num-cpu-threads-per-process": "threads_per_process",
    "--shutdown-timeout": "grace_period_s",
}
_REPLACED = {  # and the words that each is
    **dict.fromkeys(("--no-cuda", "--use-cpu", "--multi-cpu"), "--cpu"),
    **dict.fromkeys(("--mps", "--use-mps-device"), "--device mps"),
    "--use-xpu": "--device xpu",
    "--hostfile": "--hosts a,b:2",
    "--use-fsdp": "--strategy fsdp",
    "--config-file": "--profile NAME, after `headway config import FILE`",
    **dict.fromkeys(
        ("--partition", "--account", "--time", "--qos", "--gres"),
        "--submit slurm --sbatch KEY=VALUE",
    ),
    "--debug": "--debug-rank R",
}
_NOT_NEEDED = (
    *("--multi-gpu", "--standalone", "--use-env", "--monitor-interval", "--same-network"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
)


def foreign_flag(name: str, value: str) -> tuple[str, str] | None:
    """Return what another tool's flag is here, and the fix; None for an unknown flag.

    `name` has dashes between its words; `value` is what was typed after it, or empty.
    """
    if name in _NOT_NEEDED:
        return "is not needed", "remove it"
    if name in _REPLACED:
        return f"is {_REPLACED[name]} here", f"pass {_REPLACED[name]}"
    if name not in _RENAMED:
        return None
    row = TABLE[_RENAMED[name]]
    if name == "--gpu-ids" and value.isdecimal():
        value = f"{value},"  # an index there, and a count here
    is_same = row.reads(value) and row.name != "log_dir"
    return f"is {row.flag} here", f"pass {row.as_flag(value if is_same else row.metavar)}"
