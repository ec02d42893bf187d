"""Checks of the requested device, GPUs, processes and precision against a machine."""

from __future__ import annotations

from collections.abc import Sequence

from headway.errors import Code, Problem
from headway.machine.devices import DeviceSpec, Selection
from headway.machine.facts import Gpu, Machine
from headway.settings.table import Settings


def device_problems(settings: Settings, machine: Machine) -> list[Problem]:
    """Return the requests that this machine cannot fulfill, though another machine could."""
    found: list[Problem] = []
    if settings.device == "mps":
        found = _on_mps(settings, machine)
    elif settings.device == "cuda":
        found = _on_cuda(settings, machine)
    return [problem._replace(is_of_machine=True) for problem in found]


def _on_mps(settings: Settings, machine: Machine) -> list[Problem]:
    if not machine.mps:
        return settings.problem(
            Code.NO_MPS,
            f"device is 'mps', but MPS is not available: {machine.mps_reason}",
            machine.mps_fix or "set `device: auto`, or launch with --cpu",
            "device",
        )
    from headway.machine.apple import why_no_precision

    reason = why_no_precision(settings.mixed_precision, machine)
    if reason is None:
        return []
    return settings.problem(
        Code.NO_PRECISION_ON_MPS,
        f"mixed_precision is {settings.mixed_precision!r}, but {reason}",
        "set `mixed_precision: no`, or update torch or macOS",
        "mixed_precision",
    )


def _on_cuda(settings: Settings, machine: Machine) -> list[Problem]:
    visible = machine.visible_gpus
    if not visible:
        return _no_gpu(settings, machine)
    selection = settings.devices.select(visible)
    if selection.problems:
        exists = ", ".join(f"{index} {gpu.name}" for index, gpu in enumerate(visible))
        return settings.problem(
            Code.NO_SUCH_GPU,
            f"devices is {str(settings.devices)!r} ({settings.devices.reading()}), but "
            f"{'; '.join(selection.problems)}; {_shown(machine)}: {exists}",
            _other_devices(settings.devices, visible),
            "devices",
        )
    if not selection.indices:
        return _no_usable_gpu(settings, machine, selection)
    selected = [visible[index] for index in selection.indices[: settings.num_processes]]
    return [
        *_too_many_processes(settings, machine, selection),
        *_of_precision(settings, selected),
    ]


def _no_gpu(settings: Settings, machine: Machine) -> list[Problem]:
    from headway.machine.fixes import how_to_use_gpus

    count = settings.num_processes
    asked = f"device is 'cuda' for {count} processes" if count > 1 else "device is 'cuda'"
    return settings.problem(
        Code.NO_GPU,
        f"{asked}, but no GPU is visible: {machine.why_no_gpu}",
        how_to_use_gpus(machine)
        or "set `device: auto`, or launch with --cpu; run `headway doctor` for details",
        "device",
        *(["num_processes"] if count > 1 else []),
    )


def _no_usable_gpu(settings: Settings, machine: Machine, selection: Selection) -> list[Problem]:
    from headway.machine.fixes import how_to_use_gpus

    left = f"devices is {settings.devices}" if settings.devices.without else ""
    why = "; ".join(filter(None, (left, *selection.passed_over)))
    return settings.problem(
        Code.NO_USABLE_GPU,
        f"device is 'cuda', but no GPU can be used: {why}; {_shown(machine)}",
        "exclude fewer GPUs, or launch with --cpu"
        if left
        else f"{how_to_use_gpus(machine)}; or launch with --cpu",
        "device",
        *(["devices"] if left else []),
    )


def _other_devices(devices: DeviceSpec, visible: Sequence[Gpu]) -> str:
    """Return the GPUs to request instead, or how to make the requested ones usable."""
    if devices.may_become_idle(visible):
        return "wait for them with --wait, or request fewer"
    if devices.idle is not None:
        return "request fewer, or name the GPUs, as in `--devices 0,`; waiting would not help"
    found = devices._replace(without=()).select(visible).indices
    blocked = [visible[index] for index in found if visible[index].obstacle]
    if devices.named is not None and blocked:
        from headway.machine.fixes import how_to_free

        return how_to_free(blocked[0])
    return "name GPUs that exist, or `devices: all`"


def _shown(machine: Machine) -> str:
    fault = f" ({machine.mask_fault})" if machine.mask_fault else ""
    return f"visible on this machine: {machine.describe_gpus()}{fault}"


def _too_many_processes(
    settings: Settings, machine: Machine, selection: Selection
) -> list[Problem]:
    processes, selected = settings.num_processes, len(selection.indices)
    visible, devices = machine.visible_gpus, settings.devices
    has_slices = any(visible[index].slice_of for index in selection.indices)
    if has_slices and max(processes, devices.size or 0) > 1:
        names = ("num_processes", "devices") if processes > 1 else ("devices", "num_processes")
        asked = f"num_processes is {processes}" if processes > 1 else f"devices is '{devices}'"
        return settings.problem(
            Code.SEVERAL_MIG_SLICES,
            f"{asked}, but CUDA shows each process only one MIG slice, and NCCL cannot link slices",
            "pass --devices 1 --num-processes 1 and launch once for each slice, or use GPUs "
            "without MIG",
            *names,
        )
    if processes > selected:
        reason = _shown(machine)
        if selection.passed_over:
            why = "; ".join(selection.passed_over)
            reason = f"only {selected} of {len(visible)} GPUs can be used ({why})"
        elif selected < len(visible):
            reason = f"devices {devices} selects {selected} of {len(visible)} GPUs"
        return settings.problem(
            Code.TOO_FEW_GPUS,
            f"num_processes is {processes}, but {reason}",
            f"pass --num-processes {selected}, or use CPU ranks: --cpu --num-processes {processes}",
            "num_processes",
            "device",
        )
    return []


def _of_precision(settings: Settings, selected: Sequence[Gpu]) -> list[Problem]:
    if settings.mixed_precision != "bf16":
        return []
    without = [gpu for gpu in selected if gpu.capability < (8, 0)]
    if not without:
        return []
    compute = "sm_" + "".join(map(str, without[0].capability))
    return settings.problem(
        Code.NO_BF16,
        f"mixed_precision is 'bf16', but {without[0].name} ({compute}) does not support bf16",
        "set `mixed_precision: fp16`, or launch with --mixed-precision fp16",
        "mixed_precision",
    )
