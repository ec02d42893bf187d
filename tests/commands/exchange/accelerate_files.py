"""Writes the configuration files that tests import, by Accelerate's own classes.

python -m tests.commands.exchange.accelerate_files     writes them anew, from the root
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("accelerate")

FSDP = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_activation_checkpointing": False,
    "fsdp_cpu_ram_efficient_loading": True,
}
DEEPSPEED = {
    "zero_stage": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_init_flag": False,
}
FP8 = {"backend": "TE", "fp8_format": "HYBRID", "margin": 0, "use_autocast_during_eval": False}
TWO_MACHINES = {
    "num_machines": 2,
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29501,
    "same_network": True,
}

KINDS: dict[str, dict[str, Any]] = {  # the answers that make each kind of file
    "no_distribution": {"distributed_type": "NO", "num_processes": 1},
    "cpu_only": {"distributed_type": "NO", "num_processes": 1, "use_cpu": True},
    "one_gpu_by_id": {"distributed_type": "NO", "num_processes": 1, "gpu_ids": "3"},
    "several_cpus": {"distributed_type": "MULTI_CPU", "num_processes": 4, "use_cpu": True},
    "several_gpus": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 8,
        "mixed_precision": "bf16",
        "gpu_ids": "all",
    },
    "gpu_ids": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "gpu_ids": "1,3",
        "enable_cpu_affinity": True,
    },
    "several_machines": {"distributed_type": "MULTI_GPU", "num_processes": 16, **TWO_MACHINES},
    "fsdp": {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "mixed_precision": "bf16",
        "fsdp_config": FSDP,
    },
    "deepspeed": {
        "distributed_type": "DEEPSPEED",
        "num_processes": 8,
        "mixed_precision": "fp16",
        "deepspeed_config": DEEPSPEED,
    },
    "fp8": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 8,
        "mixed_precision": "fp8",
        "fp8_config": FP8,
    },
    "dynamo": {
        "distributed_type": "NO",
        "num_processes": 1,
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"},
    },
    "tpu": {"distributed_type": "XLA", "num_processes": 8, "tpu_name": "v4"},
}


def main() -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    FOLDER.mkdir(exist_ok=True)
    common = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no", "use_cpu": False}
    for name, answers in KINDS.items():
        config = ClusterConfig(**{**common, "debug": False, **answers})
        config.to_yaml_file(FOLDER / f"{name}.yaml")
    config.to_json_file(FOLDER / "tpu.json")


if __name__ == "__main__":
    main()
