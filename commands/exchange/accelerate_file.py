"""Accelerate's configuration file, to and from our settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway.commands.exchange import ON_ONE_MACHINE, Imported
from headway.contract.strategies import DDP, FSDP, HSDP
from headway.contract.strategies import SETTINGS as SHARING
from headway.devices.table import CUDA, KINDS, MPS, kind_of
from headway.errors import ConfigError, Problem
from headway.launcher.plan.accelerate import FSDP_CONFIG, fsdp_config
from headway.launcher.plan.plan import LaunchPlan
from headway.machine.devices import ALL
from headway.settings.setting import Raw
from headway.settings.table import NO, OF_MACHINES, TABLE, YES

_DEVICES = {"MPS": MPS.name, **{kind.distributed_type: name for name, kind in KINDS.items()}}
_SHARDED_TYPES = {  # on GPUs too, but no DDP; each with the key of its own settings
    "FSDP": FSDP_CONFIG,
    "DEEPSPEED": "deepspeed_config",
    "MEGATRON_LM": "megatron_lm_config",
}
_TYPES = ("NO", *_DEVICES, *_SHARDED_TYPES)
_OTHER_DEVICE_TYPES = (  # on devices that Headway does not support
    *("XLA", "TPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU"),
    *("MULTI_SDAA", "MULTI_NEURON"),
)
_STEPS = "gradient_accumulation_steps"
_NAMES = {  # their keys, and the setting that each becomes
    "num_processes": "num_processes",
    "num_machines": "num_machines",
    "machine_rank": "machine_rank",
    "main_process_ip": "main_address",
    "main_process_port": "main_port",
    "gpu_ids": "devices",
    _STEPS: _STEPS,
}
_SINGLE = ("compute_environment", "distributed_type", "use_cpu", "mixed_precision", "fp16", *_NAMES)
_MAPS = ("deepspeed_config", FSDP_CONFIG)

_STRATEGIES = {
    **dict.fromkeys(("true", "full_shard", "1"), FSDP),
    **dict.fromkeys(("no_shard", "3"), DDP),
    **dict.fromkeys(("hybrid_shard", "4"), HSDP),
}
_SAME_HERE = {  # keys of fsdp_config, and the values that say what is so in any case
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
_WRAPS = {  # a policy, and the key of what it wraps
    "transformer_based_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "size_based_wrap": "fsdp_min_num_params",
    "no_wrap": "",
}
_NULLS = ("", "~", "null")
_TRUE, _FALSE = ("true", "yes", "on", "y"), ("false", "no", "off", "n")

Left = dict[str, Any]
"""The keys of a file that are not taken over yet, with texts, lists and maps as values."""


def from_accelerate(config: Mapping[str, Any], where: str) -> Imported:
    """Return the settings that an Accelerate configuration stands for.

    `config` has every scalar as text, a missing value as `null`; `where` is the file, for messages.
    """
    if "compute_environment" not in config and "distributed_type" not in config:
        raise ConfigError(
            "not an Accelerate configuration: "
            "it sets neither compute_environment nor distributed_type",
            where=where,
            fix="pass a file that `accelerate config` wrote, or a `torchrun ...` command line",
        )
    _refuse_wrong_kinds(config, where)
    left = _without_nulls(config)
    environment = left.pop("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise ConfigError(
            f"compute_environment is {environment!r}, but only LOCAL_MACHINE is supported",
            where=where,
            fix="import a file with `compute_environment: LOCAL_MACHINE`",
        )
    values: dict[str, Raw] = {}
    not_imported: list[str] = []
    reset = ["mixed_precision"]
    kind = left.get("distributed_type", "NO")
    if kind not in (*_TYPES, *_OTHER_DEVICE_TYPES):
        raise _invalid("distributed_type", kind, f"one of {', '.join(_TYPES)}", where)
    if kind in _TYPES:
        _take_device(kind, left, values, where)
        not_imported = _take_processes(left, values, where)
        # a missing gpu_ids means all GPUs, and so on
        reset += ["device", "devices", "num_processes", *OF_MACHINES]
    _take_precision(left, values, where)
    if _STEPS in left:
        values[_STEPS] = left.pop(_STEPS)
    deepspeed = left.get("deepspeed_config", {})
    if _is_number(deepspeed.get(_STEPS)):
        values[_STEPS] = deepspeed.pop(_STEPS)
    names = {ours: theirs for theirs, ours in _NAMES.items() if ours in values}
    if kind == "FSDP":
        del left["distributed_type"]
        _take_sharding(left.get(FSDP_CONFIG, {}), values)
        reset += SHARING
    # without these, training would be a different one
    of_training = ["distributed_type", _SHARDED_TYPES.get(kind, "")]
    if "mixed_precision" in left:
        of_training += ["mixed_precision", "fp8_config"]
    lost = {key: left.pop(key) for key in of_training if key in left}
    not_imported += _lines(left)
    return Imported(values, not_imported, tuple(reset), names, lost=list(_lines(lost)))


def _refuse_wrong_kinds(config: Mapping[str, Any], where: str) -> None:
    """Raise for a list or a map where Accelerate has a single value, and the reverse."""
    problems = []
    for key, value in config.items():
        is_list, is_map = isinstance(value, list), isinstance(value, dict)
        kind = "a list" if is_list else "a map" if is_map else "a single value"
        expected = "a single value" if key in _SINGLE else "a map" if key in _MAPS else kind
        is_gpus = key == "gpu_ids" and is_list and all(isinstance(gpu, str) for gpu in value)
        if kind != expected and not is_gpus and not _is_null(value):
            problems.append(
                Problem(f"{key} is {kind}, but it must be {expected}", where, _fix(key))
            )
    if problems:
        raise ConfigError.of(problems)


def _fix(key: str) -> str:
    return f"correct {key} in that file"


def _invalid(key: str, text: str, expected: str, where: str) -> ConfigError:
    return ConfigError(f"{key} is {text!r}, but it must be {expected}", where=where, fix=_fix(key))


def _without_nulls(config: Mapping[str, Any]) -> Left:
    """Return the map without the keys that have no value."""
    found = {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in config.items()}
    return {key: value for key, value in found.items() if value and not _is_null(value)}


def _is_null(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in _NULLS


def _is_number(text: object) -> bool:
    return isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 10


def _is_true(key: str, text: str, where: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise _invalid(key, text, "true or false", where)
    return text.lower() in _TRUE


def _take_device(kind: str, left: Left, values: dict[str, Raw], where: str) -> None:
    """Move the device from `left` to `values`; how ranks share a model stays there."""
    if kind not in _SHARDED_TYPES:
        left.pop("distributed_type", None)
    on_cpu = _is_true("use_cpu", left.pop("use_cpu", "false"), where) or kind == "MULTI_CPU"
    gpus = left.get("gpu_ids", "all")
    if on_cpu:
        values["device"] = "cpu"
    elif kind in _DEVICES:
        values["device"] = _DEVICES[kind]
    elif kind in _SHARDED_TYPES or gpus != "all":
        values["device"] = CUDA.name
    if kind == "NO" and not on_cpu and left.get("num_machines", "1") == "1":
        left.setdefault("num_processes", "1")
    if gpus == "all":
        left.pop("gpu_ids", None)
    elif not on_cpu:
        del left["gpu_ids"]
        indices = gpus if isinstance(gpus, list) else gpus.split(",")
        values["devices"] = [index.strip() for index in indices if index.strip()]


def _take_processes(left: Left, values: dict[str, Raw], where: str) -> list[str]:
    """Divide Accelerate's total of processes by the machines, and move the address of machine 0.

    Returns what has no counterpart on one machine.
    """
    machines, total = left.pop("num_machines", "1"), left.pop("num_processes", None)
    for key, text in (("num_machines", machines), ("num_processes", total)):
        if text is not None and not (_is_number(text) and int(text) > 0):
            raise _invalid(key, text, "a whole number, 1 or more", where)
    if total is not None:
        each, remainder = divmod(int(total), int(machines))
        if remainder:
            raise ConfigError(
                f"num_processes is {total}, which is not divisible by num_machines, {machines}",
                where=where,
                fix="import a file for one machine, and set num_processes on each machine",
            )
        values["num_processes"] = str(each)
    if int(machines) > 1:
        if "main_process_ip" not in left:
            raise ConfigError(
                f"num_machines is {machines}, but main_process_ip is not set",
                where=where,
                fix="add `main_process_ip: HOST` to that file, the name or IP address of machine 0",
            )
        values["num_machines"] = machines
        for key in ("machine_rank", "main_process_ip", "main_process_port"):
            if key in left:
                values[_NAMES[key]] = left.pop(key)
        return []
    if left.get("machine_rank") == "0":
        del left["machine_rank"]
    return [
        f"{key}: {left.pop(key)} ({ON_ONE_MACHINE[_NAMES[key]]})"
        for key in ("main_process_ip", "main_process_port")
        if key in left
    ]


def _take_precision(left: Left, values: dict[str, Raw], where: str) -> None:
    """Move the precision from `left` to `values`; old files have `fp16: true` for it."""
    if "fp16" in left and "mixed_precision" not in left:
        left["mixed_precision"] = "fp16" if _is_true("fp16", left.pop("fp16"), where) else "no"
    precision = left.get("mixed_precision", "").lower()
    if precision in TABLE["mixed_precision"].choices:
        values["mixed_precision"] = precision
        del left["mixed_precision"]
    elif precision not in ("", "fp8"):
        raise _invalid("mixed_precision", precision, "no, fp16, bf16 or fp8", where)


def _take_sharding(left: Left, values: dict[str, Raw]) -> None:
    """Move what `fsdp_config` says to `values`.

    The keys that are left change how training is computed or which memory it needs.
    """
    words = {key: text.lower() for key, text in left.items() if isinstance(text, str)}
    values["strategy"] = FSDP
    for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        if words.get(key) in _STRATEGIES:
            values["strategy"] = _STRATEGIES[words[key]]
            del left[key]
    for key, name in _SWITCHES.items():
        if words.get(key) in ("true", "false"):
            values[name] = YES if words[key] == "true" else NO
            del left[key]
    policy = words.get("fsdp_auto_wrap_policy", "no_wrap")
    wrap = left.get(_WRAPS.get(policy, ""), "auto")
    if policy in _WRAPS and TABLE["wrap"].reads(wrap):
        values["wrap"] = wrap
        for key in (_WRAPS[policy], "fsdp_auto_wrap_policy"):
            left.pop(key, None)
    for key, same in _SAME_HERE.items():
        if words.get(key) in same:
            del left[key]


def _lines(left: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in left.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{key}.")
        else:
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            yield f"{prefix}{key}: {shown}"


def to_accelerate(plan: LaunchPlan) -> dict[str, object]:
    """Return the Accelerate configuration that launches what `plan` does."""
    settings = plan.settings
    processes = settings.num_processes * settings.num_machines
    kind = kind_of(settings.device)
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind.distributed_type if processes > 1 else "NO",
        "mixed_precision": settings.mixed_precision,
        "use_cpu": settings.device == "cpu",
        "num_processes": processes,
        "num_machines": int(settings.num_machines),
        "machine_rank": settings.machine_rank or 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "debug": False,
    }
    if sharding := fsdp_config(settings):
        config["distributed_type"] = "FSDP"
        config[FSDP_CONFIG] = sharding
    if kind.is_numbered:
        mask = plan.environment.get(kind.mask)
        config["gpu_ids"] = "all" if mask is None else mask.value
    if settings.num_machines > 1:
        config["main_process_ip"] = settings.main_address
        config["main_process_port"] = settings.main_port
    return config


def not_in_accelerate(plan: LaunchPlan, names: Sequence[str]) -> Iterator[str]:
    """Yield those of the settings `names` that an Accelerate configuration cannot express."""
    config = to_accelerate(plan)
    is_sharded = FSDP_CONFIG in config
    has_gpus = config.get("gpu_ids", "all") != "all"
    held = {
        "device": config["use_cpu"] or config["distributed_type"] != "NO" or has_gpus,
        "devices": plan.settings.devices == ALL or has_gpus,
        "main_address": "main_process_ip" in config,
        "main_port": "main_process_port" in config,
        **dict.fromkeys(("num_processes", "mixed_precision", "machine_rank"), True),
        "num_machines": not plan.settings.num_machines.is_range,
        **dict.fromkeys(("wrap", "activation_checkpointing", "cpu_offload"), is_sharded),
        "strategy": is_sharded or plan.settings.strategy == DDP,
    }
    yield from (name for name in names if not held.get(name))
