"""Checks of the requested device, GPUs, processes and precision against a machine."""

from __future__ import annotations

from collections.abc import Sequence

from headway.devices.table import kind_of
from headway.errors import Code, Problem, Remedy, advice
from headway.machine.devices import Selection
from headway.machine.facts import Gpu, Machine
from headway.settings.remedies import change, on_cpu, removal
from headway.settings.table import Settings


def device_problems(settings: Settings, machine: Machine) -> list[Problem]:
    """Return the requests that this machine cannot fulfill, though another machine could."""
    if kind_of(settings.device).is_numbered:
        found = _on_gpus(settings, machine)
    else:
        found = _on_its_only_one(settings, machine)
    return [problem._replace(is_of_machine=True) for problem in found]


def _on_its_only_one(settings: Settings, machine: Machine) -> list[Problem]:
    reason = machine.why_not(settings.device)
    if reason is None:
        return _of_precision(settings, machine, ())
    return settings.problem(
        Code.NO_MPS,
        f"device is {settings.device!r}, but {kind_of(settings.device).label} is not available: "
        f"{reason}",
        [*([advice(machine.mps_fix)] if machine.mps_fix else []), on_cpu(settings)],
        "device",
    )


def _on_gpus(settings: Settings, machine: Machine) -> list[Problem]:
    visible = machine.gpus_of(settings.device)
    if not visible:
        return _no_gpu(settings, machine)
    selection = settings.devices.select(visible)
    if selection.problems:
        exists = ", ".join(f"{index} {gpu.name}" for index, gpu in enumerate(visible))
        return settings.problem(
            Code.NO_SUCH_GPU,
            f"devices is {str(settings.devices)!r} ({settings.devices.reading()}), but "
            f"{'; '.join(selection.problems)}; {_shown(machine)}: {exists}",
            _other_devices(settings, visible),
            "devices",
        )
    if not selection.indices:
        return _no_usable_gpu(settings, machine, selection)
    selected = [visible[index] for index in selection.indices[: settings.num_processes]]
    return [
        *_too_many_processes(settings, machine, selection),
        *_of_precision(settings, machine, selected),
    ]


def _no_gpu(settings: Settings, machine: Machine) -> list[Problem]:
    from headway.machine.fixes import how_to_use_gpus

    count, device = settings.num_processes, settings.device
    asked = f"device is {device!r}" + (f" for {count} processes" if count > 1 else "")
    return settings.problem(
        Code.NO_GPU,
        f"{asked}, but no GPU is visible: {machine.why_not(device)}",
        [*how_to_use_gpus(machine, device), on_cpu(settings)],
        "device",
        *(["num_processes"] if count > 1 else []),
    )


def _no_usable_gpu(settings: Settings, machine: Machine, selection: Selection) -> list[Problem]:
    from headway.machine.fixes import how_to_use_gpus

    left = f"devices is {settings.devices}" if settings.devices.without else ""
    why = "; ".join(filter(None, (left, *selection.passed_over)))
    return settings.problem(
        Code.NO_USABLE_GPU,
        f"device is {settings.device!r}, but no GPU can be used: {why}; {_shown(machine)}",
        [*([(removal("devices"),)] if left else how_to_use_gpus(machine)), on_cpu(settings)],
        "device",
        *(["devices"] if left else []),
    )


def _other_devices(settings: Settings, visible: Sequence[Gpu]) -> list[Remedy]:
    """Return the GPUs to request instead, or how to make the requested ones usable."""
    devices = settings.devices
    found = devices._replace(without=()).select(visible).indices
    blocked = [visible[index] for index in found if visible[index].obstacle]
    remedies: list[Remedy] = []
    if devices.may_become_idle(visible):
        remedies.append(advice("wait for them with --wait"))
    elif devices.named is not None and blocked:
        from headway.machine.fixes import how_to_free

        remedies += how_to_free(blocked[0])
    if all(gpu.obstacle for gpu in visible):
        return [*remedies, on_cpu(settings)]
    steps = [change("devices", "all", "or name GPUs that exist")]
    if settings.origin("num_processes").is_user_set:
        steps.append(removal("num_processes"))
    return [*remedies, tuple(steps)]


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
            [
                (
                    change("devices", 1),
                    change("num_processes", 1, "and launch once for each slice"),
                ),
                advice("use GPUs without MIG"),
            ],
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
            [(change("num_processes", selected),), on_cpu(settings)],
            "num_processes",
            "device",
        )
    return []


def _of_precision(settings: Settings, machine: Machine, selected: Sequence[Gpu]) -> list[Problem]:
    lack = kind_of(settings.device).lack(settings.mixed_precision, machine, selected)
    if lack is None:
        return []
    return settings.problem(
        Code.NO_BF16 if selected else Code.NO_PRECISION_ON_MPS,
        f"mixed_precision is {settings.mixed_precision!r}, but {lack.reason}",
        [
            (change("mixed_precision", lack.instead),),
            *([advice(lack.advice)] if lack.advice else []),
        ],
        "mixed_precision",
    )
