"""The environment variables that a plan sets or removes, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping

from headway.contract.origin import Layer, Origin
from headway.contract.run import (
    ALLOCATION_VARIABLE,
    JOB_VARIABLE,
    KEY_VARIABLE,
    RANK_VARIABLES,
    WORLD_OF_ONE,
    Ranks,
    RunContract,
    encode,
)
from headway.devices.table import CUDA, kind_of
from headway.launcher.plan.accelerate import fsdp_variables
from headway.launcher.plan.supervision import is_world_of_one
from headway.machine.facts import Machine
from headway.settings.resolve import threads_given_by
from headway.settings.setting import Value
from headway.settings.table import TABLE, YES, Settings

LOOPBACK = "127.0.0.1"
_FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"


def variables_of(
    settings: Settings,
    machine: Machine,
    gpus: tuple[int, ...],
    supervised: str | None,
    environ: Mapping[str, str],
    began_at: float = 0.0,
    task: Ranks | None = None,
    estimated_bytes: int | None = None,
) -> dict[str, Value]:
    """Return the changes of the environment that the script inherits; None removes a variable.

    `gpus` are indices among the visible ones; the other arguments are as for `build_plan`.
    """
    device, kind = settings.device, kind_of(settings.device)
    run = _contract(settings, supervised, began_at)._replace(estimated_bytes=estimated_bytes)
    changes = {
        "HEADWAY_RUN": _ours(encode(run), "the launcher"),
        "ACCELERATE_USE_CPU": _from(settings, "device", str(device == "cpu").lower()),
        "ACCELERATE_MIXED_PRECISION": _from(settings, "mixed_precision"),
    }
    if settings.origin("gradient_accumulation_steps").layer is not Layer.DEFAULT:
        # Accelerate lets it override the script's own argument
        steps = _from(settings, "gradient_accumulation_steps")
        changes["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = steps
    changes |= {
        name: _from(settings, setting, text)
        for name, (text, setting) in fsdp_variables(settings).items()
    }
    threads = threads_given_by(settings.env) or threads_given_by(environ)
    if threads is None or settings.origin("threads_per_process").layer is not Layer.DETECTED:
        changes["OMP_NUM_THREADS"] = _from(settings, "threads_per_process")
    if device == "mps":
        # torch parses it as a number when its library loads, and crashes on other text
        on = "1" if settings.mps_fallback == "on" else "0"
        changes["PYTORCH_ENABLE_MPS_FALLBACK"] = _from(settings, "mps_fallback", on)
    there = kind_of(machine.gpu_kind)
    if device == "cpu" and machine.visible_gpus and there.empty_mask is not None:
        changes[there.mask] = _from(settings, "device", there.empty_mask)
    if environ.keys().isdisjoint((kind.mask, *kind.variables)):
        changes |= {name: _ours(text, reason) for name, (text, reason) in kind.variables.items()}
    if gpus:
        changes |= _gpu_mask(settings, machine, gpus)
    stale = _ours(None, "left over from another launch")
    changes |= {name: stale for name in RANK_VARIABLES if name in environ}
    if KEY_VARIABLE in environ:
        changes[KEY_VARIABLE] = _ours(None, "for launchers only")
    if JOB_VARIABLE in environ:
        job = _ours(f"{environ[JOB_VARIABLE]}:", "so that launches inside of ranks know their job")
        changes[ALLOCATION_VARIABLE] = job
    is_only_rank = supervised is None and task is None and is_world_of_one(settings)
    if is_only_rank:
        changes |= {
            name: _from(settings, "num_processes", text) for name, text in WORLD_OF_ONE.items()
        }
    if supervised is not None and not environ.get("PYTHONUNBUFFERED"):
        changes["PYTHONUNBUFFERED"] = _ours("1", "output goes through pipes")
    if settings.num_processes * settings.num_machines > 1 and not environ.get(_FLIGHT_RECORDER):
        reason = "records the last collectives, to explain a hang"
        changes[_FLIGHT_RECORDER] = _ours("2000", reason)
    if (is_only_rank or task is not None or supervised is not None) and _is_local(settings):
        changes |= _loopback_interfaces(settings, machine, environ)
    if settings.debug_rank is not None:
        for name, text in kind.debug_variables.items():
            changes[name] = _from(settings, "debug_rank", text)
    for name in settings.env:
        changes[name] = _from(settings, "env", settings.env[name])
    if task is not None:
        changes |= _of_task(task, settings)
    return changes


def _contract(settings: Settings, supervised: str | None, began_at: float) -> RunContract:
    """Return the settings that a script obeys, by their names."""
    names = [name for name in RunContract._fields if name in TABLE]
    values = {name: settings.values[name].value for name in names}
    yes = {name: value == YES for name, value in values.items() if YES in TABLE[name].choices}
    run = RunContract(
        **{**values, **yes},
        origins={name: settings.origin(name) for name in names},
        began_at=began_at,
    )
    return run if supervised is not None else run._replace(debug_rank=None)


def _of_task(task: Ranks, settings: Settings) -> dict[str, Value]:
    """Return the variables of this process's rank, as torch's launcher sets them."""
    origin = settings.origin("cluster")
    rank, world_size = str(task.rank), str(task.world_size)
    variables = {
        **WORLD_OF_ONE,
        **dict.fromkeys(("RANK", "ROLE_RANK"), rank),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), world_size),
        "LOCAL_RANK": str(task.local_rank),
        "LOCAL_WORLD_SIZE": str(task.local_world_size),
        "GROUP_RANK": str(settings.machine_rank),
        "GROUP_WORLD_SIZE": str(settings.num_machines),
    }
    place = {
        "MASTER_ADDR": _from(settings, "main_address", settings.main_address or LOOPBACK),
        "MASTER_PORT": _from(settings, "main_port"),
    }
    return {name: Value(text, origin) for name, text in variables.items()} | place


def _ours(value: str | None, reason: str) -> Value:
    """Return the value of a variable that does not come from a setting."""
    return Value(value, Origin(Layer.DEFAULT, reason=reason))


def _from(settings: Settings, name: str, value: str | None = None) -> Value:
    text = str(settings.values[name].value) if value is None else value
    return Value(text, settings.origin(name))


def _gpu_mask(settings: Settings, machine: Machine, gpus: tuple[int, ...]) -> dict[str, Value]:
    visible = machine.visible_gpus
    has_slices = any(visible[index].slice_of for index in gpus)
    changes = {}
    if has_slices or gpus != tuple(range(len(visible))):
        changes[kind_of(machine.gpu_kind).mask] = _from(
            settings, "devices", _mask(gpus, machine, by_uuid=has_slices)
        )
    if counts_fastest_first(machine) and machine.mask is None:
        reason = "different GPU models: same order as in nvidia-smi"
        changes["CUDA_DEVICE_ORDER"] = _ours("PCI_BUS_ID", reason)
    return changes


def counts_fastest_first(machine: Machine) -> bool:
    """Return whether CUDA's numbering of the GPUs may differ from the driver's tools.

    Source: NVIDIA, CUDA C++ Programming Guide, environment variables: CUDA_DEVICE_ORDER.
    """
    models = {gpu.name for gpu in machine.gpus}
    is_nvidia = machine.gpu_kind == CUDA.name and not machine.is_rocm
    return len(models) > 1 and machine.cuda_device_order is None and is_nvidia


def _mask(gpus: tuple[int, ...], machine: Machine, *, by_uuid: bool) -> str:
    """Map indices through an existing mask."""
    if by_uuid:
        return ",".join(machine.visible_gpus[index].uuid for index in gpus)
    if machine.mask is None:
        return ",".join(map(str, gpus))
    return ",".join(machine.mask_entries[index] for index in gpus)


def _is_local(settings: Settings) -> bool:
    """Return whether all ranks are on this machine, possibly under several agents."""
    address = settings.main_address or ""
    return settings.num_machines == 1 or address == "localhost" or address.startswith("127.")


def _loopback_interfaces(
    settings: Settings, machine: Machine, environ: Mapping[str, str]
) -> dict[str, Value]:
    interface = "lo0" if machine.system == "Darwin" else "lo"
    local = _ours(interface, "all ranks are on this machine")
    names = kind_of(settings.device).interfaces
    return {name: local for name in names if name not in environ}
