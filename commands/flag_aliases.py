"""Flags of torchrun, `accelerate launch` and others that are not ours: what each is here."""

from __future__ import annotations

from headway.settings.table import TABLE

RENAMED = {  # flags of other tools, and the setting that each is
    "--node-rank": "machine_rank",
    "--master-addr": "main_address",
    "--master-port": "main_port",
    "--shutdown-timeout": "grace_period_s",
    "--local-ranks-filter": "ranks",
    "--nproc-per-node": "num_processes",
    "--nnodes": "num_machines",
    "--num-cpu-threads-per-process": "threads_per_process",
    "--main-process-ip": "main_address",
    "--main-process-port": "main_port",
    "--gpu-ids": "devices",
    "--gpus": "devices",
    "--accelerator": "device",
    "--precision": "mixed_precision",
    "--accumulate-grad-batches": "gradient_accumulation_steps",
    **dict.fromkeys(("--num-nodes", "--nodes"), "num_machines"),
    "--num-gpus": "devices",
    **dict.fromkeys(("--nproc", "--np", "-np", "-n"), "num_processes"),
}

_NO_NEED = "remove it"
_OTHERS = {  # what it is here, and the fix
    "--use-mps-device": (
        "is not needed: an Apple GPU is used by default",
        "remove it; pass --cpu to use the CPU",
    ),
    "--no-cuda": ("is --cpu here", "pass --cpu"),
    "--use-cpu": ("is --cpu here", "pass --cpu"),
    "--multi-cpu": ("is --cpu here", "pass --cpu --num-processes N"),
    "--auto-select-gpus": ("is --devices here", "pass --devices idle:N"),
    "--multi-gpu": (
        "is not needed: all GPUs are used by default",
        "remove it; select GPUs with --devices",
    ),
    "--mps": (
        "is --device mps here",
        "pass --device mps, or remove it: MPS is the default on a Mac",
    ),
    "--standalone": ("is not needed: one machine is the default", _NO_NEED),
    "--use-env": ("is not needed: LOCAL_RANK is always in the environment", _NO_NEED),
    "--monitor-interval": ("is not needed: the end of a rank is noticed at once", _NO_NEED),
    "--same-network": ("is not needed: machines meet at --main-address", _NO_NEED),
    **dict.fromkeys(
        ("--redirects", "-r", "--tee", "-t"),
        (
            "is --log-dir here: output goes to the console and to a file for each rank",
            "pass --log-dir DIR",
        ),
    ),
    "--config-file": (
        "is a profile here, in a format of its own",
        "take it over with `headway config import {value}`",
    ),
    **dict.fromkeys(
        ("--partition", "--account", "--time", "--qos", "--gres"),
        ("is an option of sbatch", "with --submit slurm, pass --sbatch KEY=VALUE"),
    ),
    "--follow": ("is a flag of `headway logs`", "`headway logs --follow`"),
    "--version": ("is a flag of `headway` itself", "`headway --version`"),
    "--debug": (
        "is --debug-rank here, for breakpoint() in one rank",
        "pass --debug-rank R, or remove it",
    ),
}

_RENDEZVOUS = (
    "is not needed: machines meet at an address and a port of machine 0",
    "with several machines pass --main-address HOST, and --machine-rank R on each",
)
_NO_SUCH_STRATEGY = ("has no counterpart here: the strategies are ddp, fsdp and hsdp",)
_SHARDING = (
    "is among the settings of sharding here",
    "pass --strategy fsdp, and --wrap, --activation-checkpointing, --cpu-offload as needed",
)
_PLAIN = ("has no counterpart here",)
_FAMILIES = {  # prefixes of flags: what they are here, and the fix unless it is to remove them
    **dict.fromkeys(("--rdzv-", "--local-addr"), _RENDEZVOUS),
    **dict.fromkeys(
        (
            *("--use-deepspeed", "--deepspeed-", "--use-megatron-lm", "--zero"),
            *("--megatron-lm-", "--use-parallelism-config", "--parallelism-config-"),
            *("--offload-", "--gradient-clipping"),
        ),
        _NO_SUCH_STRATEGY,
    ),
    **dict.fromkeys(("--use-fsdp", "--fsdp-"), _SHARDING),
    "--fp8-": ("has no counterpart here: --mixed-precision is no, fp16 or bf16",),
    "--dynamo-": ("has no counterpart here: call torch.compile in the script",),
    **dict.fromkeys(("--tpu", "--no-tpu", "--vm", "--downcast-bf16"), ("is for TPUs",)),
    "--aws-": ("is for SageMaker",),
    "--mpirun-": ("has no counterpart here: `headway launch` starts the ranks itself",),
    "--use-xpu": ("is --device xpu here", "pass --device xpu, or remove it"),
    "--ipex": ("is for Intel's extension, which torch does not need for --device xpu",),
    **dict.fromkeys(
        (
            *("--role", "--event-log-handler", "--logs-specs", "--numa-binding", "--run-path"),
            *("--signals-to-handle", "--virtual-local-rank", "--duplicate-stdout-filters"),
            *("--duplicate-stderr-filters", "--enable-cpu-affinity", "--main-training-function"),
        ),
        _PLAIN,
    ),
}


def foreign_flag(name: str, value: str) -> tuple[str, str] | None:
    """Return what another tool's flag is here, and the fix; None for a flag that none has.

    `name` has dashes between its words; `value` is what was typed after it, or empty.
    """
    if name in RENAMED:
        row = TABLE[RENAMED[name]]
        if name == "--gpu-ids" and value.isdecimal():
            value = f"{value},"  # an index there, and a count here
        return (
            f"is {row.flag} here",
            f"pass {row.as_flag(value if row.reads(value) else row.metavar)}",
        )
    if name in _OTHERS:
        what, advice = _OTHERS[name]
        return what, advice.format(value=value or "FILE")
    for prefix, (what, *fix) in _FAMILIES.items():
        if name.startswith(prefix):
            return what, "".join(fix) or _NO_NEED
    return None
