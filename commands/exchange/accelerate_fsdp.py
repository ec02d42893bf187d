"""How Accelerate's configuration file says that models are sharded, to and from our settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.contract.strategies import DDP, FSDP, HSDP, SHARDED
from headway.settings.setting import Raw
from headway.settings.table import NO, TABLE, YES, Settings

KEY = "fsdp_config"
_STRATEGIES = {
    "true": FSDP,
    "full_shard": FSDP,
    "1": FSDP,
    "no_shard": DDP,
    "3": DDP,
    "hybrid_shard": HSDP,
    "4": HSDP,
}
_SAME_HERE = {  # keys and the values that say what is so in any case
    "fsdp_version": ("1", "2"),
    "fsdp_state_dict_type": ("sharded_state_dict", "full_state_dict"),
    "fsdp_cpu_ram_efficient_loading": ("true", "false"),
    "fsdp_use_orig_params": ("true", "false"),
    "fsdp_sync_module_states": ("true",),
    "fsdp_forward_prefetch": ("false",),
    "fsdp_backward_prefetch": ("backward_pre", "no_prefetch"),
}
_SWITCHES = {
    "fsdp_offload_params": "cpu_offload",
    "fsdp_activation_checkpointing": "activation_checkpointing",
}


def take_sharding(config: Mapping[str, Any], values: dict[str, Raw]) -> dict[str, Any]:
    """Put what a file's `fsdp_config` says into `values`; return the keys that are left.

    Those change how training is computed or which memory it needs.
    """
    left = {key: text for key, text in config.items() if isinstance(text, str)}
    nested = {key: value for key, value in config.items() if not isinstance(value, str)}
    values["strategy"] = FSDP
    for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        word = left.get(key, "").lower()
        if word in _STRATEGIES:
            values["strategy"] = _STRATEGIES[word]
            del left[key]
    for key, name in _SWITCHES.items():
        word = left.get(key, "").lower()
        if word in ("true", "false"):
            values[name] = YES if word == "true" else NO
            del left[key]
    _take_wrap(left, values)
    for key, words in _SAME_HERE.items():
        if left.get(key, "").lower() in words:
            del left[key]
    return {**left, **nested}


def _take_wrap(left: dict[str, str], values: dict[str, Raw]) -> None:
    policy = left.get("fsdp_auto_wrap_policy", "no_wrap").lower()
    key = {
        "transformer_based_wrap": "fsdp_transformer_layer_cls_to_wrap",
        "size_based_wrap": "fsdp_min_num_params",
    }.get(policy)
    if key is None and policy != "no_wrap":
        return
    wrap = left.get(key, "auto") if key else "auto"
    if not TABLE["wrap"].reads(wrap):
        return
    values["wrap"] = wrap
    for name in (key, "fsdp_auto_wrap_policy"):
        left.pop(name or "", None)


def sharding_of(settings: Settings) -> dict[str, object]:
    """Return the `fsdp_config` that shards as these settings do; empty where they do not."""
    if settings.strategy not in SHARDED:
        return {}
    wrap = settings.wrap
    config: dict[str, object] = {
        "fsdp_version": 2 if settings.strategy == FSDP else 1,
        "fsdp_reshard_after_forward": True if settings.strategy == FSDP else "HYBRID_SHARD",
        "fsdp_offload_params": settings.cpu_offload == YES,
        "fsdp_activation_checkpointing": settings.activation_checkpointing == YES,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"
        if wrap.isdecimal()
        else "TRANSFORMER_BASED_WRAP",
    }
    if wrap.isdecimal():
        config["fsdp_min_num_params"] = int(wrap)
    elif wrap != "auto":
        config["fsdp_transformer_layer_cls_to_wrap"] = wrap
    return config
