"""Merges the constructor's arguments with the launcher's run contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headway.data.configuration import DataLoaderConfiguration
from headway.devices.table import is_kind, kind_of
from headway.distributed.handler import KwargsHandler, check_choice, check_range
from headway.errors import Code, UsageError, did_you_mean
from headway.ipc.choices import AUTO, PRECISIONS, SHARDING_SETTINGS, STRATEGIES, read_wrap
from headway.ipc.origin import DEFAULT, Layer, Origin
from headway.ipc.run_contract import DEVICES, RunContract
from headway.precision.precision import Precision
from headway.strategies.compilation import DynamoBackend, TorchDynamoPlugin
from headway.strategies.sharding import FullyShardedDataParallelPlugin
from headway.strategies.strategy import Strategy
from headway.trackers.project import Folder, ProjectConfiguration
from headway.trackers.tracker_group import LogWith
from headway.training.accumulation import GradientAccumulationPlugin

CALL = "the script's Accelerator(...)"
_SCRIPT = Origin(Layer.SCRIPT, reason=CALL)
_ENGINES = (
    "deepspeed_plugin deepspeed_plugins megatron_lm_plugin parallelism_config torch_tp_plugin"
)
_LAUNCH = "num_nodes node_rank master_addr max_restarts"
UNSUPPORTED = {  # Accelerate's other arguments -> what to do instead
    **{
        name: f"pass dataloader_config=DataLoaderConfiguration({name}=...)"
        for name in ("even_batches", "dispatch_batches", "use_seedable_sampler")
    },
    "logging_dir": "pass project_dir=..., or project_config=ProjectConfiguration(logging_dir=...)",
    "fsdp_plugin": "pass it to Accelerator(...)",
    **dict.fromkeys(_LAUNCH.split(), "remove it, and start the script with `headway launch`"),
    "devices": "start with `headway launch --devices 2` for two GPUs, or `--devices 1,` for GPU 1",
    **dict.fromkeys(_ENGINES.split(), "remove it: models are trained with DistributedDataParallel"),
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of an Accelerator that are compared with the launcher's settings."""

    cpu: bool = False
    device: str | None = None
    mixed_precision: str | Precision | None = None
    gradient_accumulation_steps: int | None = None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    kwargs_handlers: Sequence[KwargsHandler] | None = None
    dynamo_backend: DynamoBackend | str | Callable[..., Any] | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    split_batches: bool = False
    dataloader_config: DataLoaderConfiguration | None = None
    global_batch_size: int | None = None
    seed: int | None = None
    log_with: LogWith = None
    project_dir: Folder = None
    project_config: ProjectConfiguration | None = None
    resume_from: Folder = None
    strategy: str | Strategy | None = None
    shard_size: int | None = None
    wrap: str | Sequence[str] | int | None = None
    activation_checkpointing: bool | None = None
    cpu_offload: bool | None = None
    forward_methods: Sequence[str] | str | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None

    @classmethod
    def select(cls, parameters: Mapping[str, Any]) -> Arguments:
        """Select the constructor's parameters that are fields of this class."""
        return cls(**{field.name: parameters[field.name] for field in fields(cls)})


def merge_arguments(
    run: RunContract | None, *, cpu: bool = False, device: str | None = None, **given: Any
) -> tuple[RunContract, list[str]]:
    """Override `run` with the constructor's arguments; None, or False for `cpu`, means omitted.

    `run` is None under plain python or torchrun, where no profile is read. The names in `given` are
    those of `RunContract`. An argument that contradicts a command-line flag raises UsageError. Also
    return a note for each overridden value.
    """
    check_precision(given.get("mixed_precision"))
    for name in ("mixed_precision", "strategy"):
        if isinstance(own := given.get(name), Precision | Strategy):  # a custom class
            given[name] = own.name
    contract = run or RunContract(AUTO, "no", 1, origins={})
    given["device"] = _device(cpu, device)
    if given["device"] == "gpu" and kind_of(contract.device).maker:
        given["device"] = contract.device  # detected by the launcher
    passed = {name: value for name, value in given.items() if value is not None}
    changed = {name: value for name, value in passed.items() if value != getattr(contract, name)}
    as_written = {"device": "cpu=True" if cpu else f"device={device!r}"}
    as_written["resume"] = f"resume_from={given.get('resume')!r}"
    notes = [
        _note(contract, name, as_written.get(name, f"{name}={value!r}"))
        for name, value in changed.items()
    ]
    origins = {**contract.origins, **dict.fromkeys(passed, _SCRIPT)}
    return contract._replace(**passed, origins=origins), [*filter(None, notes)]


def merge_sharing(arguments: Arguments) -> dict[str, Any]:
    """Return the sharding settings; each may be passed only once."""
    strategy = arguments.strategy
    if not isinstance(strategy, Strategy | None):
        fix = "pass strategy='fsdp' to shard models over the ranks, or pass a Strategy"
        check_choice("Accelerator", (AUTO, *STRATEGIES), fix, strategy=strategy)
    check_range("Accelerator", 2, shard_size=arguments.shard_size)
    passed = {name: getattr(arguments, name) for name in SHARDING_SETTINGS}
    passed["wrap"] = _wrap(arguments.wrap)
    if arguments.fsdp_plugin is None:
        return passed
    if twice := [name for name, value in passed.items() if value is not None]:
        raise _both("fsdp_plugin", f"{twice[0]}={passed[twice[0]]!r}")
    return arguments.fsdp_plugin.settings()


def _wrap(wrap: str | Sequence[str] | int | None) -> str | None:
    if wrap is None:
        return None
    try:
        return read_wrap(wrap)
    except ValueError as error:
        raise UsageError(
            f"invalid value {wrap!r} for wrap: {error}",
            where=CALL,
            fix="pass 'auto', a list of class names, or a number of parameters",
            code=Code.BAD_ARGUMENT,
        ) from None


def merge_accumulation(
    steps: int | None, plugin: GradientAccumulationPlugin | None
) -> GradientAccumulationPlugin:
    """Return the plugin, or create one from `steps`; with a plugin, `steps` must be 1 or None."""
    if plugin is None:
        check_range("Accelerator", 1, gradient_accumulation_steps=steps)
        return GradientAccumulationPlugin(num_steps=steps)
    if steps not in (None, 1):
        alone = f"GradientAccumulationPlugin(num_steps={steps!r}, ...)"
        raise _both(f"gradient_accumulation_steps={steps!r}", "gradient_accumulation_plugin", alone)
    return plugin


def merge_compilation(
    backend: DynamoBackend | str | Callable[..., Any] | None, plugin: TorchDynamoPlugin | None
) -> TorchDynamoPlugin:
    """Return the plugin, or create one from `backend`; raise UsageError if both are passed."""
    if backend is not None and plugin is not None:
        alone = f"TorchDynamoPlugin(backend={backend!r}, ...)"
        raise _both(f"dynamo_backend={backend!r}", "dynamo_plugin", alone)
    return plugin or TorchDynamoPlugin(backend=backend)


def _both(one: str, other: str, alone: str = "one of the two") -> UsageError:
    return UsageError(
        f"got both {one} and {other}", where=CALL, fix=f"pass only {alone}", code=Code.CONTRADICTION
    )


def reject_unsupported(
    arguments: Mapping[str, object], known: Iterable[str], where: str = CALL
) -> None:
    """Raise UsageError for unknown arguments, but ignore Accelerate's arguments that are None."""
    for name, value in arguments.items():
        if name in UNSUPPORTED and value is None:
            continue
        guess = did_you_mean(name, tuple(known))
        fix = UNSUPPORTED.get(name) or (f"did you mean {guess}=?" if guess else "remove it")
        raise UsageError(
            f"unsupported argument {name!r}", where=where, fix=fix, code=Code.UNSUPPORTED
        )


def check_precision(name: str | Precision | None, called: str = "Accelerator") -> None:
    if isinstance(name, str):
        fix = f"pass mixed_precision={_MEANT.get(name, 'bf16')!r}"
        check_choice(called, PRECISIONS, fix, mixed_precision=name)


_MEANT = {"fp32": "no", "float32": "no", "32": "no", "none": "no", "float16": "fp16", "16": "fp16"}


def _device(cpu: bool, device: str | None) -> str | None:
    if device not in (None, AUTO, *DEVICES) and not is_kind(str(device)):
        fix = "pass device='gpu'; `headway launch --devices 1,` selects GPU 1"
        check_choice("Accelerator", (AUTO, *DEVICES), fix, device=device)
    if cpu and device not in (None, "cpu"):
        raise _both("cpu=True", f"device={device!r}")
    return "cpu" if cpu else None if device == AUTO else device


def _note(run: RunContract, name: str, argument: str) -> str | None:
    origin = run.origins.get(name, DEFAULT)
    value = getattr(run, name)
    if origin.layer is Layer.FLAG:
        raise UsageError(
            f"Accelerator({argument}) contradicts {name}={value!r} from the command line",
            where=f"{CALL}, and {origin}",
            fix="remove the argument from the script, or the flag from the command line",
            code=Code.CONTRADICTS_RUN,
        )
    if not origin.is_user_set:
        return None  # overriding a default needs no note
    return f"Accelerator({argument}) overrides {name}={value!r} ({origin})"
