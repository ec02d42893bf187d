"""Flags of torchrun, `accelerate launch` and other tools, and their equivalents in Headway."""

from __future__ import annotations

from collections.abc import Mapping

from headway.settings.table import TABLE

_RENAMED = {  # flag of another tool: the equivalent setting
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
    **dict.fromkeys(("--redirects", "-r", "--tee", "-t", "--log-line-prefix-template"), "log_dir"),
    "--num-cpu-threads-per-process": "threads_per_process",
    "--shutdown-timeout": "grace_period_s",
    **dict.fromkeys(("--fsdp-sharding-strategy", "--fsdp-reshard-after-forward"), "strategy"),
    **dict.fromkeys(("--fsdp-transformer-layer-cls-to-wrap", "--fsdp-min-num-params"), "wrap"),
}
_REPLACED = {  # flag of another tool: the equivalent arguments
    **dict.fromkeys(("--no-cuda", "--use-cpu", "--multi-cpu"), "--cpu"),
    **dict.fromkeys(("--mps", "--use-mps-device"), "--device mps"),
    "--use-xpu": "--device xpu",
    **dict.fromkeys(("--hostfile", "--deepspeed-hostfile", "--mpirun-hostfile"), "--hosts a,b:2"),
    "--use-fsdp": "--strategy fsdp",
    "--fsdp-offload-params": "--cpu-offload",
    "--fsdp-activation-checkpointing": "--activation-checkpointing",
    "--enable-cpu-affinity": "--numa-binding node",
    "--config-file": "--profile NAME, after `headway config import FILE`",
    **dict.fromkeys(
        ("--partition", "--account", "--time", "--qos", "--gres"),
        "--submit slurm --sbatch KEY=VALUE",
    ),
    "--debug": "--debug-rank R",
}
_NOT_NEEDED = (
    *("--multi-gpu", "--standalone", "--use-env", "--monitor-interval", "--same-network"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--role", "--run-path"),
    *("--event-log-handler", "--duplicate-stdout-filters", "--duplicate-stderr-filters"),
    *("--local-addr", "--logs-specs", "--signals-to-handle", "--virtual-local-rank", "--vm"),
    *("--tpu", "--tpu-cluster", "--no-tpu-cluster", "--tpu-use-sudo", "--downcast-bf16"),
    *("--main-training-function", "--aws-access-key-id", "--aws-secret-access-key"),
    "--print-completion",
)
_UNSUPPORTED = {  # flag: the fix; "--a-" matches all flags with this prefix
    "--dynamo-": "pass Accelerator(dynamo_backend=NAME) in the script",
    "--gradient-clipping": "call accelerator.clip_grad_norm_() in the script",
    "--fp8-": "pass --mixed-precision bf16",
    "--fsdp-": "pass --strategy fsdp; `headway launch --help` lists its flags",
    **dict.fromkeys(
        (
            *("--use-deepspeed", "--deepspeed-", "--zero-stage", "--zero3-", "--use-megatron-lm"),
            *("--megatron-lm-", "--offload-optimizer-", "--offload-param-"),
            *("--use-parallelism-config", "--parallelism-config-"),
        ),
        "pass --strategy fsdp: only DDP and FSDP are supported",
    ),
}
_SUPPORTED_VARIABLES = (  # torchrun's variables that a launch reads, or whose effect is the default
    *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    *("PET_RDZV_ENDPOINT", "PET_MAX_RESTARTS", "PET_STANDALONE"),
)
_SAME_NAME = ("--log-dir", "--numa-binding", "--no-python", "--module")


def other_tool_flag(name: str, value: str) -> tuple[str, str] | None:
    """Return a description of another tool's flag and the fix; None for an unknown flag.

    `name` has dashes between its words; `value` is the word after the flag, or empty.
    """
    if name in _NOT_NEEDED:
        return "has no equivalent here and is not needed", "remove it"
    if name in _REPLACED:
        return f"is {_REPLACED[name]} here", f"pass {_REPLACED[name]}"
    if name not in _RENAMED:
        for foreign, fix in _UNSUPPORTED.items():
            if name == foreign or (foreign[-1] == "-" and name.startswith(foreign)):
                return "of torchrun or accelerate launch has no equivalent here", fix
        return None
    row = TABLE[_RENAMED[name]]
    if name == "--gpu-ids" and value.isdecimal():
        value = f"{value},"  # an index in Accelerate, a count in Headway
    is_same = row.accepts(value) and row.name != "log_dir"
    return f"is {row.flag} here", f"pass {row.as_flag(value if is_same else row.metavar)}"


def torchrun_note(environ: Mapping[str, str]) -> list[str]:
    """Return a note that lists the PET_* variables of torchrun that a launch ignores."""
    parts = []
    for name, value in environ.items():
        is_default_handler = name in _SUPPORTED_VARIABLES or value in ("", "0", "c10d", "static")
        if name.startswith("PET_") and not is_default_handler:
            flag = "--" + name[4:].lower().replace("_", "-")
            own = f"pass {flag}" if flag in _SAME_NAME else "remove it"
            parts.append(f"{name} ({(other_tool_flag(flag, value) or ('', own))[1]})")
    return [f"a launch ignores these variables of torchrun: {', '.join(parts)}"] * bool(parts)
