"""Accelerate's names for sharding settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from headway.distributed.handler import check_call
from headway.errors import Code, UsageError
from headway.ipc.choices import AUTO, DDP, FSDP, HSDP
from headway.ipc.run_contract import RunContract

CALL = "the script's FullyShardedDataParallelPlugin(...)"

SHARDING = {"FULL_SHARD": FSDP, "HYBRID_SHARD": HSDP, "NO_SHARD": DDP}
"""Accelerate's sharding strategies, mapped to Headway's equivalent strategies."""

WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_DICTS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")

ONLY_FSDP1 = (
    *("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params"),
    *("sync_module_states", "param_init_fn", "state_dict_config", "optim_state_dict_config"),
)
"""Fields without a counterpart in FSDP2."""

_REFUSED = {
    **dict.fromkeys(
        ONLY_FSDP1, "remove it: it applies only to FSDP1, and models are sharded by FSDP2"
    ),
    "mixed_precision_policy": "pass Accelerator(mixed_precision='bf16')",
    "ignored_modules": "pass only the other modules to prepare()",
    "activation_checkpointing_offload": "pass only activation_checkpointing=True",
}


@dataclass
class FullyShardedDataParallelPlugin:
    """Sharding settings for `Accelerator(fsdp_plugin=...)`; they have no effect with one rank.

    They are equivalent to the settings strategy, wrap, activation_checkpointing and cpu_offload.

    Args:
        fsdp_version: 1 or 2; in either case, `fully_shard` (FSDP2) is used.
        sharding_strategy: `FULL_SHARD` (fsdp), `HYBRID_SHARD` (hsdp) or `NO_SHARD` (ddp).
        reshard_after_forward: must be True; units are always resharded after their forward pass.
        auto_wrap_policy: `TRANSFORMER_BASED_WRAP` or `SIZE_BASED_WRAP`, configured by the next two
            arguments; None and `NO_WRAP` use the model's repeated blocks.
        transformer_cls_names_to_wrap: class names of the units; None detects them.
        min_num_params: the minimum number of parameters per unit.
        cpu_offload: keep sharded parameters, gradients and optimizer states on the CPU.
        activation_checkpointing: recompute the activations of units in the backward pass.
        state_dict_type: no effect; checkpoints are always sharded, and `get_state_dict` always
            returns full state dicts.
        cpu_ram_efficient_loading: no effect; see `Accelerator.empty_init`.
        mixed_precision_policy: unsupported, like all arguments after it.

    Raises:
        UsageError: a value is invalid, or a field applies only to FSDP1.

    Examples:
        >>> from headway import FullyShardedDataParallelPlugin
        >>> FullyShardedDataParallelPlugin(
        ...     auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        ... ).settings()["wrap"]
        'Block'
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    auto_wrap_policy: str | None = None
    transformer_cls_names_to_wrap: Sequence[str] | None = None
    min_num_params: int | None = None
    cpu_offload: bool | None = None
    activation_checkpointing: bool | None = None
    state_dict_type: Any = None
    cpu_ram_efficient_loading: bool | None = None
    mixed_precision_policy: Any = None
    ignored_modules: Any = None
    activation_checkpointing_offload: bool | None = None
    backward_prefetch: Any = None
    forward_prefetch: bool | None = None
    limit_all_gathers: bool | None = None
    use_orig_params: bool | None = None
    sync_module_states: bool | None = None
    param_init_fn: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None

    def __post_init__(self) -> None:
        check_call(type(self).__init__, (), vars(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _REFUSED and value is not None and value is not False:
                raise _wrong(field.name, value, _REFUSED[field.name])
        if self.fsdp_version not in (None, 1, 2):
            raise _wrong("fsdp_version", self.fsdp_version, "pass 2, or omit it")
        policy = self.auto_wrap_policy
        if policy is not None and str(policy).upper() not in WRAP_POLICIES:
            raise _wrong("auto_wrap_policy", policy, f"pass one of {', '.join(WRAP_POLICIES)}")
        if self.state_dict_type is not None and _name(self.state_dict_type) not in STATE_DICTS:
            raise _wrong("state_dict_type", self.state_dict_type, "pass 'SHARDED_STATE_DICT'")
        if self.reshard_after_forward not in (None, True):
            raise _wrong("reshard_after_forward", self.reshard_after_forward, "pass True")
        if self._strategy() is None:
            fix = f"pass one of {', '.join(SHARDING)}"
            raise _wrong("sharding_strategy", self.sharding_strategy, fix)

    def settings(self) -> dict[str, Any]:
        """Return the equivalent settings by name."""
        return {
            "strategy": self._strategy(),
            "wrap": self._wrap(),
            "activation_checkpointing": bool(self.activation_checkpointing),
            "cpu_offload": bool(self.cpu_offload),
        }

    def _strategy(self) -> str | None:
        given = self.sharding_strategy
        return FSDP if given is None else SHARDING.get(_name(given))

    def _wrap(self) -> str:
        policy = str(self.auto_wrap_policy).upper()
        if policy == "SIZE_BASED_WRAP" and self.min_num_params:
            return str(self.min_num_params)
        if policy == "TRANSFORMER_BASED_WRAP" and self.transformer_cls_names_to_wrap:
            return ",".join(self.transformer_cls_names_to_wrap)
        return AUTO


def effective_plugin(
    given: FullyShardedDataParallelPlugin | None, run: RunContract
) -> FullyShardedDataParallelPlugin:
    if given is None:
        given = FullyShardedDataParallelPlugin(
            activation_checkpointing=run.activation_checkpointing, cpu_offload=run.cpu_offload
        )
    whole = given.state_dict_type or "FULL_STATE_DICT"  # as `get_state_dict` returns it
    return replace(given, fsdp_version=2, state_dict_type=whole)


def _name(value: Any) -> str:
    return str(getattr(value, "name", value)).upper()


def _wrong(name: str, value: object, fix: str) -> UsageError:
    return UsageError(f"{name} is {value!r}", where=CALL, fix=fix, code=Code.BAD_ARGUMENT)
