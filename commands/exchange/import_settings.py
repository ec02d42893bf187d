"""`headway config import FILE`: import settings from an `accelerate config` file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from headway.commands.config.check import SCRIPT, checked_values
from headway.commands.config.edit import apply, set_all
from headway.commands.flags import Parser
from headway.devices.table import CUDA, KINDS, MPS
from headway.errors import Code, ConfigError, Problem
from headway.ipc.choices import DDP, FSDP, HSDP
from headway.ipc.choices import SHARDING_SETTINGS as OF_STRATEGIES
from headway.ipc.origin import Layer, Origin
from headway.machine.detection import detect_machine
from headway.settings.profile import (
    Entry,
    compose,
    parse_profile,
    read_text,
    shown,
    trusted_profile,
)
from headway.settings.profile_edit import unset_value
from headway.settings.setting import Raw
from headway.settings.table import NO, OF_MACHINES, TABLE, YES

_DEVICES = {"MPS": MPS.name, **{kind.distributed_type: name for name, kind in KINDS.items()}}
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # types that use GPUs
_TYPES = ("NO", *_DEVICES, *_SHARDED)
_OF_TRAINING = (  # keys that change training, or the memory that it needs
    *("distributed_type", "deepspeed_config", "megatron_lm_config", "fsdp_config"),
    *("mixed_precision", "fp8_config", "fp16"),
)
_STEPS = "gradient_accumulation_steps"
_OF_SEVERAL_MACHINES = {  # key: the equivalent setting
    "machine_rank": "machine_rank",
    "main_process_ip": "main_address",
    "main_process_port": "main_port",
}
_RESET = (*("device", "devices", "num_processes", "mixed_precision"), *OF_MACHINES, *OF_STRATEGIES)
"""Settings to remove from the profile if the file omits them, so that the defaults apply."""

_STRATEGIES = {
    **dict.fromkeys(("true", "full_shard", "1"), FSDP),
    **dict.fromkeys(("no_shard", "3"), DDP),
    **dict.fromkeys(("hybrid_shard", "4"), HSDP),
}
_SWITCHES = {
    "fsdp_offload_params": "cpu_offload",
    "fsdp_activation_checkpointing": "activation_checkpointing",
}
_WRAPS = {  # wrap policy: the key of its modules
    "transformer_based_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "size_based_wrap": "fsdp_min_num_params",
    "no_wrap": "",
}
_SAME_HERE = {  # key of fsdp_config: values without an effect in Headway
    "fsdp_version": ("1", "2"),
    "fsdp_state_dict_type": ("sharded_state_dict", "full_state_dict"),
    "fsdp_cpu_ram_efficient_loading": ("true", "false"),
    "fsdp_use_orig_params": ("true", "false"),
    "fsdp_sync_module_states": ("true",),
    "fsdp_forward_prefetch": ("false",),
    "fsdp_backward_prefetch": ("backward_pre", "no_prefetch"),
}
_LOSES = (
    "training would differ: Headway supports DDP and FSDP in fp32, fp16 and bf16, but not these "
    "keys"
)
_TRUE, _FALSE = ("true", "yes"), ("false", "no")


def import_file(argv: Sequence[str]) -> int:
    parser = Parser(
        "config import",
        "Write the settings of an `accelerate config` file (YAML or JSON) to your profile.",
        usage="headway config import [--profile NAME] FILE",
    )
    parser.shared_flags("--profile")
    parsed, words = parser.parse_words(argv)
    if len(words) != 1:
        parser.error("exactly one `accelerate config` file is required")
    where = shown(words[0])
    text = read_text(words[0], "configuration")
    config = _texts_at(compose(text, Origin(Layer.IMPORTED, where)), where)
    imported = from_accelerate(config if isinstance(config, dict) else {}, where)
    origin = Origin(Layer.IMPORTED, reason=where)
    try:
        values = checked_values({name: Entry(raw, origin) for name, raw in imported.values.items()})
    except ConfigError as error:
        problems = [problem._replace(fix="correct it in that file") for problem in error.problems]
        raise ConfigError.of(problems) from None
    path = trusted_profile(parsed.profile).path
    profile = [] if parsed.profile is None else ["--profile", parsed.profile]
    if imported.lost:
        fix = "if different training is acceptable, import a copy of the file without these keys"
        raise ConfigError.of(
            [Problem(_LOSES, where, fix, details="\n".join(imported.lost), code=Code.BAD_FILE)]
        )

    def merged(text: str) -> str:
        before = parse_profile(text, path, Layer.PROFILE) if text else {}
        for name in before.keys() & {*_RESET} - values.keys():
            text = unset_value(text, name)
        return set_all(text, values)

    apply(path, merged, detect_machine(), origin)
    print(f"next: {shlex.join(['headway', 'launch', *profile, SCRIPT])}")
    for line in imported.not_imported:
        print(f"not imported: {line}", file=sys.stderr)
    return 0


def _texts_at(node: Any, where: str) -> Any:
    """Convert a YAML node to data, with every scalar as text."""
    if node is None or node.id == "scalar":
        return node and node.value
    if node.id == "sequence":
        return [_texts_at(item, where) for item in node.value]
    found: dict[str, Any] = {}
    for key, value in node.value:
        if key.id != "scalar" or key.value in found:
            what = f"duplicate key {key.value!r}" if key.id == "scalar" else "a key is not a scalar"
            at, fix = f"{where}, line {key.start_mark.line + 1}", "correct it in that file"
            raise ConfigError(what, where=at, fix=fix, code=Code.DUPLICATE_KEY)
        found[key.value] = _texts_at(value, where)
    return found


class Imported(NamedTuple):
    values: dict[str, Raw]
    lost: list[str]  # one line per key that would change training
    not_imported: list[str]  # one line per other key without an equivalent


def from_accelerate(config: Mapping[str, Any], where: str) -> Imported:
    """Convert an Accelerate configuration to settings.

    In `config`, scalars are text and missing values are `null`; `where` names the file in messages.
    """
    if "compute_environment" not in config and "distributed_type" not in config:
        raise ConfigError(
            "not an Accelerate configuration: "
            "it sets neither compute_environment nor distributed_type",
            where=where,
            fix="pass a file that `accelerate config` wrote",
            code=Code.BAD_FILE,
        )
    file = _File(_without_nulls(config), where)
    file.choice("compute_environment", ("LOCAL_MACHINE",), "LOCAL_MACHINE")
    kind = file.choice("distributed_type", _TYPES, "NO")
    values = {**_device(file, kind), **_machines(file, kind)}
    precision = file.text("mixed_precision").lower()
    if precision in TABLE["mixed_precision"].choices:
        values["mixed_precision"] = precision
    elif precision:  # fp8, or another precision of Accelerate
        file.left["mixed_precision"] = precision
    if steps := file.text(_STEPS):
        values[_STEPS] = steps
    if kind == "FSDP":
        values |= _sharding(file.map("fsdp_config"))
    elif kind in _SHARDED:
        file.left["distributed_type"] = kind
    lost = {key: file.left.pop(key) for key in _OF_TRAINING if key in file.left}
    return Imported(values, [*_lines(lost)], [*_lines(file.left)])


def _device(file: _File, kind: str) -> dict[str, Raw]:
    uses_cpu = file.choice("use_cpu", (*_TRUE, *_FALSE), "false") in _TRUE
    if uses_cpu or kind == "MULTI_CPU":
        return {"device": "cpu"}
    gpus = file.texts("gpu_ids")
    chosen: dict[str, Raw] = {} if gpus in ([], ["all"]) else {"devices": gpus}
    if kind in _DEVICES:
        return {"device": _DEVICES[kind], **chosen}
    return {"device": CUDA.name, **chosen} if kind in _SHARDED or chosen else {}


def _machines(file: _File, kind: str) -> dict[str, Raw]:
    """Return num_machines and num_processes, which Accelerate's file counts on all machines."""
    machines, total = file.count("num_machines") or 1, file.count("num_processes")
    if machines == 1:
        file.left.pop("machine_rank", None)
        total = 1 if kind == "NO" and total is None else total
        return {} if total is None else {"num_processes": str(total)}
    if total is not None and total % machines:
        raise ConfigError(
            f"num_processes ({total}) is not divisible by num_machines ({machines})",
            where=file.where,
            fix="import a file for one machine, and set num_processes on each machine",
            code=Code.BAD_FILE,
        )
    if "main_process_ip" not in file.left:
        raise ConfigError(
            f"num_machines is {machines}, but main_process_ip is not set",
            where=file.where,
            fix="add `main_process_ip: HOST` to that file, where HOST is the name or IP address of "
            "machine 0",
            code=Code.BAD_FILE,
        )
    values: dict[str, Raw] = {"num_machines": str(machines)}
    if total is not None:
        values["num_processes"] = str(total // machines)
    for key in [key for key in _OF_SEVERAL_MACHINES if key in file.left]:
        values[_OF_SEVERAL_MACHINES[key]] = file.text(key)
    return values


def _sharding(left: dict[str, Any]) -> dict[str, Raw]:
    """Convert keys of `fsdp_config` to settings, and remove them from `left`."""
    words = {key: text.lower() for key, text in left.items() if isinstance(text, str)}
    values: dict[str, Raw] = {"strategy": FSDP}
    taken = {key for key, same in _SAME_HERE.items() if words.get(key) in same}
    for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        if words.get(key) in _STRATEGIES:
            values["strategy"] = _STRATEGIES[words[key]]
            taken.add(key)
    for key, name in _SWITCHES.items():
        if words.get(key) in ("true", "false"):
            values[name] = YES if words[key] == "true" else NO
            taken.add(key)
    policy = words.get("fsdp_auto_wrap_policy", "no_wrap")
    wrap = left.get(_WRAPS.get(policy, ""), "auto")
    if policy in _WRAPS and TABLE["wrap"].accepts(wrap):
        values["wrap"] = wrap
        taken |= {_WRAPS[policy], "fsdp_auto_wrap_policy"}
    for key in taken & left.keys():
        del left[key]
    return values


class _File:
    """The unread keys of a configuration; reading a key removes it."""

    def __init__(self, left: dict[str, Any], where: str) -> None:
        self.left, self.where = left, where

    def text(self, key: str, default: str = "") -> str:
        value = self.left.pop(key, default)
        return value if isinstance(value, str) else self._refuse(key, value, "a single value")

    def texts(self, key: str) -> list[str]:
        """Return a list, or the parts of a comma-separated string."""
        value = self.left.pop(key, [])
        found = value.split(",") if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
            self._refuse(key, value, "a list of single values")
        return [word.strip() for word in found]

    def map(self, key: str) -> dict[str, Any]:
        """Return the mapping of a key, without removing the key."""
        value = self.left.get(key, {})
        return value if isinstance(value, dict) else self._refuse(key, value, "a mapping")

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self.text(key, default)
        found = [word for word in choices if word.lower() == value.lower()]
        return found[0] if found else self._refuse(key, value, f"one of {', '.join(choices)}")

    def count(self, key: str) -> int | None:
        text = self.text(key)
        if text and not (text.isascii() and text.isdecimal() and int(text)):
            self._refuse(key, text, "an integer, 1 or more")
        return int(text) if text else None

    def _refuse(self, key: str, value: object, expected: str) -> NoReturn:
        raise ConfigError(
            f"invalid value {value!r} for {key}: must be {expected}",
            where=self.where,
            fix=f"correct {key} in that file",
            code=Code.BAD_VALUE,
        )


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in config.items()}
    return {
        key: value
        for key, value in found.items()
        if value and str(value).lower() not in ("~", "null")
    }


def _lines(left: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in left.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{key}.")
        else:
            text = " ".join(map(str, value)) if isinstance(value, list) else value
            yield f"{prefix}{key}: {text}"
