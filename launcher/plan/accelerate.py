"""Sharding by Accelerate's own runtime: what `accelerate launch` sets for the same answers."""

from __future__ import annotations

from headway.contract.strategies import FSDP, HSDP, SHARDED
from headway.devices.table import kind_of
from headway.errors import Code, Problem
from headway.launcher.plan.program import OF_ACCELERATE, Program
from headway.settings.table import NO, YES, Settings

FSDP_CONFIG = "fsdp_config"
_LAYERS = "fsdp_transformer_layer_cls_to_wrap"
_VARIABLES = {_LAYERS: "FSDP_TRANSFORMER_CLS_TO_WRAP"}  # those not named after their key
_SETTINGS = {  # that a key comes from; the others from the strategy
    "fsdp_offload_params": "cpu_offload",
    "fsdp_activation_checkpointing": "activation_checkpointing",
    **dict.fromkeys(("fsdp_auto_wrap_policy", "fsdp_min_num_params", _LAYERS), "wrap"),
}


def fsdp_config(settings: Settings) -> dict[str, object]:
    """Return the `fsdp_config` that shards as these settings do; empty where they do not.

    Accelerate has copies of shards (hsdp) in the first version of FSDP alone, in each machine one.
    """
    if settings.strategy not in SHARDED or settings.num_processes * settings.num_machines == 1:
        return {}
    wrap, by_size = settings.wrap, settings.wrap.isdecimal()
    config: dict[str, object] = {
        "fsdp_version": 2 if settings.strategy == FSDP else 1,
        "fsdp_reshard_after_forward": True if settings.strategy == FSDP else "HYBRID_SHARD",
        "fsdp_offload_params": settings.cpu_offload == YES,
        "fsdp_activation_checkpointing": settings.activation_checkpointing == YES,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP" if by_size else "TRANSFORMER_BASED_WRAP",
    }
    if settings.strategy == HSDP:
        config["fsdp_sharding_strategy"] = "HYBRID_SHARD"
        config |= dict.fromkeys(("fsdp_use_orig_params", "fsdp_sync_module_states"), True)
    if by_size:
        config["fsdp_min_num_params"] = int(wrap)
    elif wrap != "auto":
        config[_LAYERS] = wrap
    return config


def fsdp_variables(settings: Settings) -> dict[str, tuple[str, str]]:
    """Return the variables that Accelerate reads of sharding, each with its text and setting."""
    config = fsdp_config(settings)
    is_there = kind_of(settings.device).is_numbered and settings.replace_accelerate == NO
    if not config or not is_there:
        return {}
    texts = {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in config.items()
    }
    return {
        "ACCELERATE_USE_FSDP": ("true", "strategy"),
        **{
            _VARIABLES.get(key, key.upper()): (text, _SETTINGS.get(key, "strategy"))
            for key, text in texts.items()
        },
    }


def keeps_accelerate(settings: Settings, program: Program) -> bool:
    """Return whether a script trains with Accelerate's own runtime, as far as its text shows."""
    has_library = any(name in OF_ACCELERATE for name in program.libraries)
    has_runtime = program.imports == "accelerate" or has_library
    return bool(program.imports) and has_runtime and settings.replace_accelerate == NO


def accelerate_problems(settings: Settings, program: Program) -> list[Problem]:
    """Return what is asked for that Accelerate's own runtime cannot do, before a script with it."""
    if not keeps_accelerate(settings, program):
        return []
    is_sharded, size = bool(fsdp_config(settings)), settings.shard_size
    if is_sharded and not kind_of(settings.device).is_numbered:
        name, why = "strategy", f"shards no model on {settings.device}"
    elif is_sharded and settings.strategy == HSDP and size not in (None, settings.num_processes):
        name, why = "shard_size", "shards among the ranks of each machine"
    elif not is_sharded and settings.activation_checkpointing == YES:
        name, why = "activation_checkpointing", "has it for sharded models only"
    else:
        return []
    return [
        Problem(
            f"{name} is {settings.values[name].value}, but {program.name} trains with"
            f" {program.imports}, without Headway: Accelerate's runtime {why}",
            settings.where(name),
            f"remove {name}; if a module of the script makes headway's Accelerator, import headway"
            " in the script as well",
            code=Code.NOT_IN_ACCELERATE,
            names=(name,),
        )
    ]
