"""What contradicts itself, what this machine cannot do, and what should be said all the same."""

from __future__ import annotations

from collections.abc import Sequence

from headway.contract.origin import Layer
from headway.contract.run import VARIABLE as RUN_VARIABLE
from headway.errors import Problem
from headway.launcher.planning.variables import RANK_VARIABLES, SETTING_OF, counts_fastest_first
from headway.machine.devices import ALL, DeviceSpec, Selection
from headway.machine.facts import Gpu, Machine
from headway.settings.table import Settings


def contradictions(settings: Settings) -> list[Problem]:
    """Return what is wrong with the settings on any machine."""
    problems = []
    device, processes = settings.device, settings.num_processes
    if device == "cpu" and settings.mixed_precision == "fp16":
        problems += settings.problem(
            "mixed_precision is 'fp16', but on a CPU only bf16 is supported",
            "set `mixed_precision: bf16`, or launch with --mixed-precision bf16",
            "mixed_precision",
            "device",
        )
    is_only_one = device == "mps" and settings.devices.first == 1
    selects_gpus = settings.devices != ALL and not is_only_one
    if device != "cuda" and selects_gpus and not _is_overruled(settings, "devices", "device"):
        is_detected = settings.origin("device").layer is Layer.DETECTED
        problems += settings.problem(
            f"devices is {str(settings.devices)!r}, but it selects GPUs, and device is {device!r}",
            "leave devices out; for several CPU ranks set num_processes"
            + ("" if is_detected else "; for GPUs leave device to `auto`"),
            "devices",
            "device",
        )
    size = settings.devices.size
    both = device == "cuda" and _said(settings, "devices", "num_processes")
    if both and size not in (None, processes):
        problems += settings.problem(
            f"devices selects {size} GPU{'s' * (size != 1)} ({settings.devices.reading()}), "
            f"but num_processes is {processes}",
            "leave one of the two out, or make them agree",
            "devices",
            "num_processes",
        )
    if settings.origin("device").layer is not Layer.DETECTED:
        problems += _several_on_mps(settings)
    problems += _contradictions_of_machines(settings)
    for name in settings.env:
        if name in RANK_VARIABLES or name == RUN_VARIABLE:
            problems += settings.problem(
                f"env sets {name}, which the launcher sets for each process",
                f"remove {name} from `env`",
                "env",
            )
        if name in SETTING_OF:
            problems += settings.problem(
                f"env sets {name}, which follows from the setting {SETTING_OF[name]}",
                f"set {SETTING_OF[name]} instead",
                "env",
                SETTING_OF[name],
            )
    if "OMP_NUM_THREADS" in settings.env and _said(settings, "threads_per_process"):
        problems += settings.problem(
            f"threads_per_process is {settings.threads_per_process}, but env sets "
            f"OMP_NUM_THREADS={settings.env['OMP_NUM_THREADS']}",
            "leave one of the two out",
            "threads_per_process",
            "env",
        )
    return problems


def _contradictions_of_machines(settings: Settings) -> list[Problem]:
    problems = []
    machines, rank = settings.num_machines, settings.machine_rank
    if rank >= machines:
        problems += settings.problem(
            f"machine_rank is {rank}, but with num_machines {machines} "
            + (f"it is from 0 to {machines - 1}" if machines > 1 else "the only machine is 0"),
            "give every machine its own rank, counted from 0, and the same num_machines",
            "machine_rank",
            "num_machines",
        )
    if machines > 1 and settings.main_address is None:
        problems += settings.problem(
            f"num_machines is {machines}, but nobody says where machine 0 is",
            "set main_address=HOST, or launch with --main-address HOST, on every machine: the name "
            "or IP address of machine 0",
            "num_machines",
            "main_address",
        )
    return problems


def impossible_here(settings: Settings, machine: Machine) -> list[Problem]:
    """Return what this machine cannot do."""
    if settings.device == "mps":
        return _impossible_on_mps(settings, machine)
    if settings.device == "cuda":
        return _impossible_on_cuda(settings, machine)
    return []


def _impossible_on_mps(settings: Settings, machine: Machine) -> list[Problem]:
    if not machine.mps:
        return settings.problem(
            f"device is 'mps', but this machine has none: {machine.mps_reason}",
            machine.mps_fix or "set `device: auto`, or launch with --cpu",
            "device",
        )
    problems = []
    if settings.origin("device").layer is Layer.DETECTED:
        problems += _several_on_mps(settings)
    from headway.machine.apple import why_no_precision

    reason = why_no_precision(settings.mixed_precision, machine)
    if reason is not None:
        problems += settings.problem(
            f"mixed_precision is {settings.mixed_precision!r}, but {reason}",
            "set `mixed_precision: no`, or update",
            "mixed_precision",
        )
    return problems


def _several_on_mps(settings: Settings) -> list[Problem]:
    if settings.device != "mps" or settings.num_processes * settings.num_machines == 1:
        return []
    return settings.problem(
        f"num_processes is {settings.num_processes} on {settings.num_machines} machine(s), "
        "but MPS is one device in one process, without a process group",
        f"use one process, or CPU ranks: --cpu --num-processes {settings.num_processes}",
        "num_processes",
        "num_machines",
        "device",
    )


def _impossible_on_cuda(settings: Settings, machine: Machine) -> list[Problem]:
    visible = machine.visible_gpus
    if not visible:
        from headway.settings.diagnosis import how_to_use_gpus

        count = settings.num_processes
        asked = f"device is 'cuda' for {count} processes" if count > 1 else "device is 'cuda'"
        return settings.problem(
            f"{asked}, but this machine shows no GPU: {machine.why_no_gpu}",
            how_to_use_gpus(machine)
            or "set `device: auto`, or launch with --cpu; `headway doctor` says more",
            "device",
            *(["num_processes"] if count > 1 else []),
        )
    selection = settings.devices.select(visible)
    if selection.wrong:
        exists = ", ".join(f"{index} {gpu.name}" for index, gpu in enumerate(visible))
        return settings.problem(
            f"devices is {str(settings.devices)!r} ({settings.devices.reading()}), but "
            f"{'; '.join(selection.wrong)}; {_shown(machine)}: {exists}",
            _other_devices(settings.devices, visible),
            "devices",
        )
    if not selection.indices:
        from headway.settings.diagnosis import how_to_use_gpus

        left = f"devices is {settings.devices}" if settings.devices.without else ""
        why = "; ".join(filter(None, (left, *selection.passed_over)))
        return settings.problem(
            f"device is 'cuda', but no GPU can be used: {why}; {_shown(machine)}",
            "leave fewer GPUs out, or launch with --cpu"
            if left
            else f"{how_to_use_gpus(machine)}; or launch with --cpu",
            "device",
            *(["devices"] if left else []),
        )
    selected = [visible[index] for index in selection.indices[: settings.num_processes]]
    return [
        *_too_many_processes(settings, machine, selection),
        *_impossible_precision(settings, selected),
    ]


def _other_devices(devices: DeviceSpec, visible: Sequence[Gpu]) -> str:
    """Return which GPUs to ask for instead, or how to get those that were asked for."""
    if devices.may_become_idle(visible):
        return "wait for them with --wait, or ask for fewer"
    if devices.idle is not None:
        return "ask for fewer, or name the GPUs, as in `--devices 0,`; waiting would not help"
    found = devices._replace(without=()).select(visible).indices
    blocked = [visible[index] for index in found if visible[index].obstacle]
    if devices.named is not None and blocked:
        from headway.settings.diagnosis import how_to_free

        return how_to_free(blocked[0])
    return "name GPUs that exist, or `devices: all`"


def _shown(machine: Machine) -> str:
    fault = f" ({machine.mask_fault})" if machine.mask_fault else ""
    return f"this machine shows {machine.describe_gpus()}{fault}"


def _too_many_processes(
    settings: Settings, machine: Machine, selection: Selection
) -> list[Problem]:
    processes, selected = settings.num_processes, len(selection.indices)
    visible, devices = machine.visible_gpus, settings.devices
    has_slices = any(visible[index].slice_of for index in selection.indices)
    if has_slices and max(processes, devices.size or 0) > 1:
        asked = f"num_processes is {processes}" if processes > 1 else f"devices is '{devices}'"
        return settings.problem(
            f"{asked}, but CUDA shows a process one MIG slice only, and NCCL joins no slices",
            "one slice and one process: --devices 1 --num-processes 1; one launch for each "
            "slice, or GPUs without MIG",
            "num_processes",
            "devices",
        )
    if processes > selected:
        reason = _shown(machine)
        if selection.passed_over:
            why = "; ".join(selection.passed_over)
            reason = f"only {selected} of {len(visible)} GPUs can be used ({why})"
        elif selected < len(visible):
            reason = f"devices {devices} selects {selected} of {len(visible)} GPUs"
        return settings.problem(
            f"num_processes is {processes}, but {reason}",
            f"--num-processes {selected}, or CPU ranks: --cpu --num-processes {processes}",
            "num_processes",
            "device",
        )
    return []


def _impossible_precision(settings: Settings, selected: Sequence[Gpu]) -> list[Problem]:
    if settings.mixed_precision != "bf16":
        return []
    without = [gpu for gpu in selected if gpu.capability < (8, 0)]
    if not without:
        return []
    compute = "sm_" + "".join(map(str, without[0].capability))
    return settings.problem(
        f"mixed_precision is 'bf16', but a GPU ({without[0].name}, {compute}) has no bf16",
        "set `mixed_precision: fp16`, or launch with --mixed-precision fp16",
        "mixed_precision",
    )


def notes(settings: Settings, machine: Machine, supervised: str | None) -> list[str]:
    """Return what is not wrong, and yet should be said before the start."""
    return [
        *_without_effect(settings, supervised),
        *(_about_gpus(settings, machine) if settings.device == "cuda" else []),
        *_unused_gpus(settings, machine),
    ]


def _unused_gpus(settings: Settings, machine: Machine) -> list[str]:
    """Say why a machine with GPUs computes on its CPU though nobody asked for that."""
    device, reason = machine.best_device()
    origin = settings.origin("device")
    is_detected = origin.layer is Layer.DETECTED and not origin.variable
    if not machine.gpus or device != "cpu" or not is_detected:
        return []
    from headway.settings.diagnosis import how_to_use_gpus

    gpus = f"{len(machine.gpus)} GPU" + "s" * (len(machine.gpus) > 1)
    return [f"not used: {gpus}, as {reason}; fix: {how_to_use_gpus(machine)}"]


def _without_effect(settings: Settings, supervised: str | None) -> list[str]:
    """Name what was set for this very launch and has no effect in it."""
    where: dict[str, str] = {}
    if settings.num_machines == 1:
        where |= {"main_address": "on one machine", "main_port": "on one machine"}
    if settings.device != "cuda" and _is_overruled(settings, "devices", "device"):
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


def _said(settings: Settings, *names: str) -> bool:
    """True when somebody set all of these, rather than a default or a detection."""
    return all(settings.origin(name).is_said for name in names)


def _is_overruled(settings: Settings, name: str, by: str) -> bool:
    """True when the setting `by` was said in a stronger layer than `name`, which contradicts it."""
    weaker, stronger = settings.origin(name).layer, settings.origin(by).layer
    return weaker.is_weaker_than(stronger)
