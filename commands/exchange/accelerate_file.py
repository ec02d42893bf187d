"""Accelerate's configuration file, to and from our settings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway.commands.exchange.accelerate_fsdp import KEY, sharding_of, take_sharding
from headway.commands.exchange.imported import MULTI_MACHINE, ON_ONE_MACHINE, Imported
from headway.contract.strategies import DDP
from headway.contract.strategies import SETTINGS as SHARING
from headway.devices.table import CUDA, KINDS, MPS, kind_of
from headway.errors import ConfigError, Problem
from headway.launcher.planning.plan import LaunchPlan
from headway.machine.devices import ALL
from headway.settings.setting import Raw
from headway.settings.table import TABLE

_DEVICES = {"MPS": MPS.name, **{kind.distributed_type: name for name, kind in KINDS.items()}}
_SUPPORTED_TYPES = ("NO", *_DEVICES)
_SHARDED_TYPES = {  # on GPUs too, but no DDP; each with the key of its own settings
    "FSDP": "fsdp_config",
    "DEEPSPEED": "deepspeed_config",
    "MEGATRON_LM": "megatron_lm_config",
}
_OTHER_DEVICE_TYPES = (  # on devices that Headway does not support
    *("XLA", "TPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU"),
    *("MULTI_SDAA", "MULTI_NEURON"),
)


_NAMES = {  # their keys, and the setting that each becomes
    "num_processes": "num_processes",
    "num_machines": "num_machines",
    "machine_rank": "machine_rank",
    "main_process_ip": "main_address",
    "main_process_port": "main_port",
    "gpu_ids": "devices",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_SINGLE_VALUES = ("compute_environment", "distributed_type", "use_cpu", "mixed_precision", "fp16")


def from_accelerate(config: Mapping[str, Any], where: str) -> Imported:
    """Return the settings that an Accelerate configuration stands for.

    Args:
        config: the file's map, with every scalar as text; a missing value is `null`.
        where: the file, for messages.

    Raises:
        ConfigError: it is not an Accelerate configuration, is for SageMaker, or its processes
            cannot be divided among its machines.
    """
    if "compute_environment" not in config and "distributed_type" not in config:
        raise ConfigError(
            "not an Accelerate configuration: "
            "it sets neither compute_environment nor distributed_type",
            where=where,
            fix="pass a file that `accelerate config` wrote, or a `torchrun ...` command line",
        )
    _refuse_wrong_kinds(config, where)
    config = _without_nulls(config)
    rest = {key: text for key, text in config.items() if isinstance(text, str)}
    nested: dict[str, Any] = {
        key: value for key, value in config.items() if not isinstance(value, str)
    }
    if rest.pop("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigError(
            f"compute_environment is {config['compute_environment']!r}, "
            "but only LOCAL_MACHINE is supported",
            where=where,
            fix="import a file with `compute_environment: LOCAL_MACHINE`",
        )
    values: dict[str, Raw] = {}
    not_imported: list[str] = []
    reset: tuple[str, ...] = ("mixed_precision",)
    kind = rest.get("distributed_type", "NO")
    if kind not in (*_SUPPORTED_TYPES, *_SHARDED_TYPES, *_OTHER_DEVICE_TYPES):
        known = ", ".join((*_SUPPORTED_TYPES, *_SHARDED_TYPES))
        raise _invalid("distributed_type", kind, f"one of {known}", where)
    if kind in (*_SUPPORTED_TYPES, *_SHARDED_TYPES):
        if isinstance(nested.get("gpu_ids"), list):
            rest["gpu_ids"] = ",".join(nested.pop("gpu_ids"))
        _take_device(rest, values, where)
        not_imported = _take_processes(rest, values, where)
        # a missing gpu_ids means all GPUs, and so on
        reset = (*reset, "device", "devices", "num_processes", *MULTI_MACHINE)
    _take_precision(rest, values, where)
    if "gradient_accumulation_steps" in rest:
        values["gradient_accumulation_steps"] = rest.pop("gradient_accumulation_steps")
    deepspeed = nested.get("deepspeed_config")
    if isinstance(deepspeed, dict) and _is_number(deepspeed.get("gradient_accumulation_steps")):
        deepspeed = dict(deepspeed)
        values["gradient_accumulation_steps"] = deepspeed.pop("gradient_accumulation_steps")
        nested["deepspeed_config"] = deepspeed
    names = {ours: theirs for theirs, ours in _NAMES.items() if ours in values}
    if kind == "FSDP":
        rest.pop("distributed_type", None)
        sharding = nested.get(KEY)
        nested[KEY] = take_sharding(sharding if isinstance(sharding, dict) else {}, values)
        nested = {key: value for key, value in nested.items() if value}
        reset = (*reset, *SHARING)
    left = {**rest, **nested}
    lost = {key: left.pop(key) for key in _training_keys(kind, left) if key in left}
    not_imported += _lines(left)
    return Imported(values, not_imported, reset, names, lost=list(_lines(lost)))


def _training_keys(kind: str, left: Mapping[str, Any]) -> Sequence[str]:
    """Return the keys of those in `left` without which training would be a different one."""
    precision = ["mixed_precision", "fp8_config"] if "mixed_precision" in left else []
    return ["distributed_type", *precision, *filter(None, [_SHARDED_TYPES.get(kind)])]


def _refuse_wrong_kinds(config: Mapping[str, Any], where: str) -> None:
    """Raise for a list or a map where Accelerate has a single value, and the reverse."""
    problems = []
    for key, value in config.items():
        is_list, is_map = isinstance(value, list), isinstance(value, dict)
        kind = "a list" if is_list else "a map" if is_map else "a single value"
        is_gpus = key == "gpu_ids" and is_list and all(isinstance(v, str) for v in value)
        if key in (*_SINGLE_VALUES, *_NAMES) and (is_list or is_map) and not is_gpus:
            problems.append(
                Problem(f"{key} is {kind}, but it must be a single value", where, _fix(key))
            )
        if key == "deepspeed_config" and not is_map and not _is_null(value):
            problems.append(Problem(f"{key} is {kind}, but it must be a map", where, _fix(key)))
    if problems:
        raise ConfigError.of(problems)


def _fix(key: str) -> str:
    return f"correct {key} in that file"


def _take_precision(rest: dict[str, str], values: dict[str, Raw], where: str) -> None:
    """Move the precision from `rest` to `values`; old files have `fp16: true` for it."""
    if "fp16" in rest and "mixed_precision" not in rest:
        rest["mixed_precision"] = "fp16" if _is_true("fp16", rest.pop("fp16"), where) else "no"
    precision = rest.get("mixed_precision", "").lower()
    if precision in TABLE["mixed_precision"].choices:
        values["mixed_precision"] = precision
        del rest["mixed_precision"]
    elif precision not in ("", "fp8"):
        raise _invalid("mixed_precision", precision, "no, fp16, bf16 or fp8", where)


_NULLS = ("", "~", "null")
_TRUE, _FALSE = ("true", "yes", "on", "y"), ("false", "no", "off", "n")


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the map without the keys that have no value."""
    found = {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in config.items()}
    return {key: value for key, value in found.items() if value and not _is_null(value)}


def _is_null(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in _NULLS


def _invalid(key: str, text: str, expected: str, where: str) -> ConfigError:
    return ConfigError(f"{key} is {text!r}, but it must be {expected}", where=where, fix=_fix(key))


def _is_number(text: object) -> bool:
    return isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 10


def _take_device(rest: dict[str, str], values: dict[str, Raw], where: str) -> None:
    """Move the device from `rest` to `values`; how ranks share a model stays there."""
    kind = rest.get("distributed_type", "NO")
    if kind in _SUPPORTED_TYPES:
        rest.pop("distributed_type", None)
    on_cpu = _is_true("use_cpu", rest.pop("use_cpu", "false"), where) or kind == "MULTI_CPU"
    gpus = rest.get("gpu_ids", "all")
    if on_cpu:
        values["device"] = "cpu"
    elif kind in _DEVICES:
        values["device"] = _DEVICES[kind]
    elif kind in _SHARDED_TYPES or gpus != "all":
        values["device"] = CUDA.name
    if kind == "NO" and not on_cpu and rest.get("num_machines", "1") == "1":
        rest.setdefault("num_processes", "1")
    if gpus == "all":
        rest.pop("gpu_ids", None)
    elif not on_cpu:
        indices = [index.strip() for index in rest.pop("gpu_ids").split(",") if index.strip()]
        values["devices"] = indices


def _is_true(key: str, text: str, where: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise _invalid(key, text, "true or false", where)
    return text.lower() in _TRUE


def _take_processes(rest: dict[str, str], values: dict[str, Raw], where: str) -> list[str]:
    """Divide Accelerate's total of processes by the machines, and move the address of machine 0.

    Returns what has no counterpart on one machine.
    """
    machines = rest.pop("num_machines", "1")
    total = rest.pop("num_processes", None)
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
        if "main_process_ip" not in rest:
            raise ConfigError(
                f"num_machines is {machines}, but main_process_ip is not set",
                where=where,
                fix="add `main_process_ip: HOST` to that file, the name or IP address of machine 0",
            )
        values["num_machines"] = machines
        for key in ("machine_rank", "main_process_ip", "main_process_port"):
            if key in rest:
                values[_NAMES[key]] = rest.pop(key)
        return []
    if rest.get("machine_rank") == "0":
        rest.pop("machine_rank")
    return [
        f"{key}: {rest.pop(key)} ({ON_ONE_MACHINE[_NAMES[key]]})"
        for key in ("main_process_ip", "main_process_port")
        if key in rest
    ]


def _lines(rest: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in rest.items():
        if isinstance(value, Mapping) and value:
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
    if processes > 1 and (sharding := sharding_of(settings)):
        config["distributed_type"] = "FSDP"
        config[KEY] = sharding
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
    is_sharded = KEY in config
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
