"""The constructor's arguments laid over what the launcher said. Decides only; prints nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headway.contract.origin import DEFAULT, Layer
from headway.contract.precisions import PRECISIONS
from headway.contract.run import DEVICES, RunContract
from headway.errors import UsageError, did_you_mean

CALL = "the script's Accelerator(...)"
AUTO = "auto"
NO_LAUNCHER = RunContract(AUTO, "no", 1, origins={})
SUPPORTED = (
    "device_placement",
    "split_batches",
    "mixed_precision",
    "gradient_accumulation_steps",
    "cpu",
    "device",
    "devices",
    "step_scheduler_with_optimizer",
)
UNSUPPORTED = {  # Accelerate's other arguments -> what to do instead
    "dataloader_config": "pass split_batches=... itself; every other field keeps its default",
    "gradient_accumulation_plugin": "pass gradient_accumulation_steps=...",
    "even_batches": "remove it: every rank always gets equally many batches",
    "dispatch_batches": "remove it: every rank reads its own share of the data",
    "use_seedable_sampler": "remove it: set_seed() decides the order in which samples come",
    "rng_types": "remove it: samplers always agree across ranks",
    "log_with": "remove it, and log in the script under `if accelerator.is_main_process`",
    "project_dir": "remove it, and give accelerator.save() a full path",
    "project_config": "remove it, and give accelerator.save() a full path",
    "dynamo_backend": "call torch.compile(model) before prepare()",
    "dynamo_plugin": "call torch.compile(model) before prepare()",
    "kwargs_handlers": "remove it: torch's defaults hold for DDP and GradScaler",
    "deepspeed_plugin": "remove it: models are trained with DistributedDataParallel",
    "deepspeed_plugins": "remove it: models are trained with DistributedDataParallel",
    "fsdp_plugin": "remove it: models are trained with DistributedDataParallel",
    "torch_tp_plugin": "remove it: models are trained with DistributedDataParallel",
    "megatron_lm_plugin": "remove it: models are trained with DistributedDataParallel",
    "parallelism_config": "remove it: models are trained with DistributedDataParallel",
}


class EffectiveSettings(NamedTuple):
    """What holds in this process, and the lines that say which wishes lost."""

    device: str  # auto, cpu, cuda or mps
    mixed_precision: str
    gradient_accumulation_steps: int
    precision_from: str
    notes: tuple[str, ...] = ()


def merge_arguments(
    run: RunContract | None,
    *,
    mixed_precision: str | None = None,
    gradient_accumulation_steps: int | None = None,
    cpu: bool = False,
    device: str | None = None,
) -> EffectiveSettings:
    """Lay the constructor's arguments over `run`; None (False for `cpu`) means no opinion.

    Args:
        run: what the launcher said; None under plain python or torchrun, where no profile is read.

    Raises:
        UsageError: an argument is no possible value, or contradicts a flag of the command line.
    """
    _check_precision(mixed_precision)
    if gradient_accumulation_steps is not None:
        check_steps(gradient_accumulation_steps)
    said = run or NO_LAUNCHER
    wanted = _device(cpu, device)
    if wanted == "gpu" and said.device in ("cuda", "mps"):  # the launcher knows which one it is
        wanted = said.device
    given: dict[str, Any] = {
        "device": wanted,
        "mixed_precision": mixed_precision,
        "gradient_accumulation_steps": gradient_accumulation_steps,
    }
    wishes = {name: value for name, value in given.items() if value is not None}
    beaten = {name: value for name, value in wishes.items() if value != getattr(said, name)}
    as_typed = {"device": "cpu=True" if cpu else f"device={device!r}"}
    notes = [
        _note(run, name, as_typed.get(name, f"{name}={value!r}"))
        for name, value in beaten.items()
        if run is not None
    ]
    holds = said._replace(**wishes)
    return EffectiveSettings(
        device=holds.device,
        mixed_precision=holds.mixed_precision,
        gradient_accumulation_steps=holds.gradient_accumulation_steps,
        precision_from=str(said.origins.get("mixed_precision", CALL))
        if mixed_precision is None
        else CALL,
        notes=tuple(note for note in notes if note is not None),
    )


def reject_unsupported(arguments: Mapping[str, object]) -> None:
    """Refuse arguments that Headway does not have; one of Accelerate's that is None asks nothing.

    Raises:
        UsageError: names the first of them and the way out.
    """
    for name, value in arguments.items():
        if name in UNSUPPORTED and value is None:
            continue
        guess = did_you_mean(name, SUPPORTED)
        fix = UNSUPPORTED.get(name) or (f"did you mean {guess}=?" if guess else "remove it")
        raise UsageError(f"Accelerator() takes no argument {name!r}", where=CALL, fix=fix)


def check_steps(steps: int) -> None:
    """Raise UsageError unless `steps` is a number of micro-batches."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(
            f"gradient_accumulation_steps is {steps!r}, not a whole number from 1 on",
            where=CALL,
            fix="pass the number of micro-batches in one optimizer step",
        )


def _check_precision(name: str | None) -> None:
    if name is not None and name not in PRECISIONS:
        raise UsageError(
            f"mixed_precision is {name!r}, not one of {', '.join(PRECISIONS)}",
            where=CALL,
            fix=f"pass mixed_precision={_MEANT.get(name, 'bf16')!r}",
        )


_MEANT = {"fp32": "no", "float32": "no", "32": "no", "none": "no", "float16": "fp16", "16": "fp16"}


def _device(cpu: bool, device: str | None) -> str | None:
    if device is not None and device not in (AUTO, *DEVICES):
        raise UsageError(
            f"device is {device!r}, not one of {', '.join((AUTO, *DEVICES))}",
            where=CALL,
            fix="pass device='gpu', and devices=[1] for GPU 1",
        )
    if cpu and device not in (None, "cpu"):
        raise UsageError(
            f"cpu=True and device={device!r} contradict each other",
            where=CALL,
            fix="pass one of the two",
        )
    return "cpu" if cpu else None if device == AUTO else device


def _note(run: RunContract, name: str, argument: str) -> str | None:
    origin = run.origins.get(name, DEFAULT)
    said = getattr(run, name)
    if origin.layer is Layer.FLAG:
        raise UsageError(
            f"Accelerator({argument}) contradicts {name} {said!r} of the command line",
            where=f"{CALL}, and {origin}",
            fix="remove the argument from the script, or the flag from the command line",
        )
    if not origin.is_user_set:
        return None  # beating nobody's wish is not worth a line
    return f"headway: Accelerator({argument}) beats {name} {said!r} ({origin})"
