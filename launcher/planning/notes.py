"""What is no problem, and yet should be said before the start."""

from __future__ import annotations

from headway.contract.origin import Layer
from headway.launcher.planning.program import Program
from headway.launcher.planning.variables import counts_fastest_first
from headway.machine.facts import Machine
from headway.settings.table import Settings


def notes(
    settings: Settings,
    machine: Machine,
    program: Program,
    supervised: str | None,
    in_process: bool,
) -> list[str]:
    """Return one sentence for each thing that will be otherwise than it may seem."""
    return [
        *_without_effect(settings, supervised),
        *(_about_gpus(settings, machine) if settings.device == "cuda" else []),
        *_unused_gpus(settings, machine),
        *_of_debugging(settings, program, supervised),
        *(_too_late(settings) if in_process else []),
    ]


def _unused_gpus(settings: Settings, machine: Machine) -> list[str]:
    """Say why a machine with GPUs computes on its CPU though nobody asked for that."""
    device, reason = machine.best_device()
    origin = settings.origin("device")
    is_best = origin.layer is Layer.DETECTED and not origin.variable
    if not machine.gpus or device != "cpu" or not is_best:
        return []
    from headway.machine.fixes import how_to_use_gpus

    gpus = f"{len(machine.gpus)} GPU" + "s" * (len(machine.gpus) > 1)
    return [f"not used: {gpus}, as {reason}; fix: {how_to_use_gpus(machine)}"]


def _without_effect(settings: Settings, supervised: str | None) -> list[str]:
    """Name what was set for this very launch and has no effect in it."""
    where: dict[str, str] = {}
    if settings.num_machines == 1:
        where |= {"main_address": "on one machine", "main_port": "on one machine"}
    if settings.device != "cuda" and settings.is_overridden("devices", "device"):
        where["devices"] = f"on {settings.device}, which {settings.origin('device')} asks for"
    if settings.device != "mps":
        where["mps_fallback"] = f"on {settings.device}"
    if settings.debug_rank is not None and supervised is not None:
        where |= {"ranks": "beside debug_rank", "hang_timeout": "beside debug_rank"}
    return [
        f"{name} has no effect {place} ({settings.origin(name)})"
        for name, place in where.items()
        if settings.origin(name).is_for_this_launch or name == "devices"
    ]


def _about_gpus(settings: Settings, machine: Machine) -> list[str]:
    devices = settings.devices
    selection = devices.select(machine.visible_gpus)
    said = []
    if settings.origin("devices").is_for_this_launch and devices.first is not None:
        said.append(f"devices {devices} = {devices.reading()}")
    if devices.idle is not None:
        said.append(f"devices {devices} = GPU {', '.join(map(str, selection.indices))}")
    said += [f"passed over {reason}" for reason in selection.passed_over]
    if machine.mask_fault is not None:
        said.append(f"{machine.mask_fault}: {machine.describe_gpus()}")
    slices = sum(bool(gpu.slice_of) for gpu in machine.visible_gpus)
    if slices > 1 and devices.size is None:
        said.append(f"of {slices} MIG slices one is used, as CUDA shows a process no more")
    indices = [name for name in (*(devices.named or ()), *devices.without) if isinstance(name, int)]
    if machine.scheduler is not None and indices:
        said.append(
            f"devices names GPUs by index ({devices}; {settings.origin('devices')}), but "
            f"{machine.scheduler} hands out the GPUs of this node: a count such as "
            f"--devices {len(selection.indices)} also holds elsewhere"
        )
    mask = machine.cuda_visible_devices or ""
    if counts_fastest_first(machine) and any(part.strip().isdecimal() for part in mask.split(",")):
        said.append(
            f"CUDA_VISIBLE_DEVICES={mask} counts the fastest GPU first, and nvidia-smi by slot; "
            "with CUDA_DEVICE_ORDER=PCI_BUS_ID both count alike"
        )
    return said


def _of_debugging(settings: Settings, program: Program, supervised: str | None) -> list[str]:
    if settings.debug_rank is None or supervised is None:
        return []
    said = []
    if settings.log_dir is not None:
        said.append(f"rank {settings.debug_rank} writes to the terminal, and into no log file")
    if program.kind == "program":
        said.append(f"debug_rank suspends no timeouts in {program.name}: it is no script")
    return said


def _too_late(settings: Settings) -> list[str]:
    return [
        f"env sets {name}, which a process reads at its start: too late here"
        for name in settings.env
        if name.startswith(("PYTHON", "LD_", "DYLD_"))
    ]
