"""Checks of the settings against each other and against a machine.

`resolve` reports invalid values; `headway doctor` checks only the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.devices.table import KINDS, kind_of
from headway.errors import Code, Problem
from headway.ipc.choices import FSDP, HSDP, PRECISIONS, other_precisions
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import ACCELERATE, RANK_VARIABLES
from headway.ipc.run_contract import VARIABLE as RUN_VARIABLE
from headway.machine.devices import ALL, Selection, gpu_labels
from headway.machine.facts import Gpu, Machine
from headway.settings.profile import Entries, Entry
from headway.settings.resolve import try_resolve
from headway.settings.setting import AUTO
from headway.settings.table import NO, TABLE, YES, Settings

SETTING_OF = {
    **{variable: name for name, variable in ACCELERATE.items()},
    **{kind.mask: "devices" for kind in KINDS.values() if kind.mask},
    **dict.fromkeys(("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "devices"),
}
"""Variables that Headway derives from a setting, so `env` must not set them."""

_VARIABLES = frozenset(row.variable for row in TABLE.values())
_IN_FILES = (Layer.PROFILE, Layer.USER_PROFILE, Layer.PROJECT_PROFILE, Layer.ANSWERS)


def problems(settings: Settings, machine: Machine | None = None) -> list[Problem]:
    """Return the problems that prevent a launch with these settings.

    Without a machine, return only machine-independent problems.
    """
    found = [
        *_device_problems(settings),
        *_machine_problems(settings),
        *_variable_problems(settings),
        *_sharding_problems(settings, machine),
    ]
    # if num_processes is detected, another machine may have more ranks
    if machine is not None or not _is_detected(settings, "num_processes"):
        found += _rank_problems(settings)
    found += _process_limit_problems(settings, machine)
    if machine is not None:
        found += [item._replace(is_of_machine=True) for item in _problems_here(settings, machine)]
    return found


def profile_problems(layers: Sequence[Entries], machine: Machine) -> Sequence[Problem]:
    """Return the problems that profiles (in ascending precedence) have on every machine.

    Detected values come from this machine.
    """
    devices = [str(layer["device"].raw) for layer in layers if "device" in layer]
    if not devices or devices[-1].strip().lower() in (AUTO, "gpu"):  # fewest problems on a GPU
        gpus = Origin(Layer.DEFAULT, reason="a machine with GPUs")
        layers = [*layers, {"device": Entry(machine.gpu_kind, gpus)}]
    settings, invalid = try_resolve(layers, machine, {})
    return [*invalid, *problems(settings)]


def _is_detected(settings: Settings, name: str) -> bool:
    return settings.origin(name).layer is Layer.DETECTED


def _device_problems(settings: Settings) -> Iterator[Problem]:
    device, processes = settings.device, settings.num_processes
    kind = kind_of(device)
    fits = other_precisions(kind.lacking)
    if settings.mixed_precision not in ("no", *fits):
        yield from _problem(
            settings,
            Code.FP16_ON_CPU,
            f"mixed_precision is {settings.mixed_precision!r}, but the {kind.label} supports only"
            f" {' and '.join(fits) or repr('no')}",
            [change(settings, "mixed_precision", (fits or ["no"])[-1])],
            ["mixed_precision", "device"],
        )
    is_only_one = kind.most_ranks == 1 and settings.devices.first == 1
    selects_gpus = settings.devices != ALL and not is_only_one
    is_meant = not settings.is_overridden("devices", "device")
    if not kind.is_numbered and selects_gpus and is_meant:
        yield from _problem(
            settings,
            Code.DEVICES_WITHOUT_CUDA,
            f"devices {str(settings.devices)!r} selects GPUs, but device is {device!r}",
            [removal(settings, "devices", "and set num_processes for several CPU ranks")],
            ["devices", "device"],
        )
    size = settings.devices.size
    both = kind.is_numbered and settings.are_user_set("devices", "num_processes")
    if both and size not in (None, processes):
        yield from _problem(
            settings,
            Code.DEVICES_OR_PROCESSES,
            f"devices selects {size} GPU{'s' * (size != 1)} ({settings.devices.describe()}), "
            f"but num_processes is {processes}",
            [removal(settings, "num_processes"), change(settings, "num_processes", size)],
            ["devices", "num_processes"],
        )


def _process_limit_problems(settings: Settings, machine: Machine | None) -> Iterator[Problem]:
    kind, is_detected = kind_of(settings.device), _is_detected(settings, "device")
    if kind.most_ranks != 1 or (machine is None and is_detected):
        return
    one = [change(settings, "num_processes", 1)] if settings.num_processes > 1 else []
    if settings.num_machines > 1:
        one.append(_one_machine_fix(settings))
    if not one:
        return
    yield from _problem(
        settings,
        Code.SEVERAL_ON_MPS,
        f"num_processes is {settings.num_processes} on {settings.num_machines} machine(s), "
        f"but {kind.label} supports only one process",
        [" and ".join(one), _cpu_fix(settings)],
        ["num_processes", "num_machines", "device"],
        is_of_machine=is_detected,
    )


def _machine_problems(settings: Settings) -> Iterator[Problem]:
    machines, rank = settings.num_machines, settings.machine_rank
    if rank is not None and rank >= machines:
        there = f"the ranks are 0 to {machines - 1}"
        remedies: list[str] = [
            change(settings, "machine_rank", machines - 1, "because ranks start at 0"),
            change(settings, "num_machines", rank + 1),
        ]
        if machines == 1:
            there = "the only rank is 0"
            remedies = [
                removal(settings, "machine_rank", "or set num_machines to the number of machines")
            ]
        yield from _problem(
            settings,
            Code.MACHINE_RANK,
            f"machine_rank is {rank}, but num_machines is {machines}: {there}",
            remedies,
            ["machine_rank", "num_machines"],
        )
    if machines > 1 and settings.main_address is None:
        yield from _problem(
            settings,
            Code.NO_MAIN_ADDRESS,
            f"num_machines is {machines}, but main_address is not set",
            [
                change(
                    settings, "main_address", "HOST", "the host name or IP address of machine 0"
                ),
                _one_machine_fix(settings),
            ],
            ["num_machines", "main_address"],
        )


def _variable_problems(settings: Settings) -> Iterator[Problem]:
    for name in settings.env:
        code, names, note = Code.VARIABLE_OF_LAUNCHER, [f"env.{name}"], ""
        if name in _VARIABLES:
            why, note = "this launch has already read", "and set it in the shell, or pass a flag"
        elif name in RANK_VARIABLES or name == RUN_VARIABLE:
            why = "the launcher sets for each process"
        elif name in SETTING_OF:
            code, names = Code.VARIABLE_OF_SETTING, [*names, SETTING_OF[name]]
            why = f"Headway derives from the setting {SETTING_OF[name]}"
            note = f"and set {SETTING_OF[name]} instead"
        else:
            continue
        fix = removal(settings, f"env.{name}", note)
        yield from _problem(settings, code, f"env sets {name}, which {why}", [fix], names)
    if "OMP_NUM_THREADS" in settings.env and settings.are_user_set("threads_per_process"):
        yield from _problem(
            settings,
            Code.THREADS_TWICE,
            f"threads_per_process is {settings.threads_per_process}, but env sets "
            f"OMP_NUM_THREADS={settings.env['OMP_NUM_THREADS']}",
            [removal(settings, "threads_per_process"), removal(settings, "env.OMP_NUM_THREADS")],
            ["threads_per_process", "env.OMP_NUM_THREADS"],
        )


def _sharding_problems(settings: Settings, machine: Machine | None) -> Iterator[Problem]:
    is_detected = _is_detected(settings, "device")
    lacks_gpu = settings.cpu_offload == YES and not kind_of(settings.device).is_numbered
    if lacks_gpu and not (machine is None and is_detected):  # another machine may have a GPU
        yield from _problem(
            settings,
            Code.OFFLOAD_WITHOUT_GPU,
            "cpu_offload moves parameters from a GPU to the CPU, but device is "
            f"{settings.device!r}",
            [change(settings, "cpu_offload", NO)],
            ["cpu_offload", "device"],
            is_of_machine=is_detected,
        )
    world_size, size = settings.num_processes * settings.num_machines, settings.shard_size
    is_known = machine is not None or not _is_detected(settings, "num_processes")
    if settings.strategy != HSDP or world_size == 1 or not is_known:
        return
    sizes = [size for size in range(2, world_size + 1) if world_size % size == 0]
    if size is None and 1 in (settings.num_machines, settings.num_processes):
        each = "one machine" if settings.num_machines == 1 else "one process on each machine"
        yield from _problem(
            settings,
            Code.NO_SHARD_SIZE,
            f"strategy is 'hsdp' on {each}, but shard_size is not set",
            [change(settings, "strategy", FSDP), change(settings, "shard_size", sizes[0])],
            ["strategy", "shard_size"],
        )
    if size is not None and world_size % size:
        fitting = max((other for other in sizes if other <= size), default=sizes[0])
        yield from _problem(
            settings,
            Code.SHARD_SIZE,
            f"{world_size} ranks are not divisible by shard_size ({size})",
            [change(settings, "shard_size", fitting), change(settings, "strategy", FSDP)],
            ["shard_size", "strategy", "num_processes"],
        )


def _rank_problems(settings: Settings) -> list[Problem]:
    processes, debug_rank = settings.num_processes, settings.debug_rank
    if settings.num_machines == 1:
        found = missing_ranks(settings, processes)
        if debug_rank is not None and debug_rank >= processes:
            found += _missing_rank(settings, "debug_rank", debug_rank, processes)
        return found
    if debug_rank is None:
        return []
    return _problem(
        settings,
        Code.DEBUG_ON_MACHINES,
        f"debug_rank is {debug_rank}, but num_machines is "
        f"{settings.num_machines}: ranks on other machines would not wait for that rank",
        [removal(settings, "debug_rank"), _one_machine_fix(settings)],
        ["debug_rank", "num_machines"],
    )


def missing_ranks(settings: Settings, world_size: int) -> list[Problem]:
    missing = [rank for rank in settings.ranks or () if rank >= world_size]
    return _missing_rank(settings, "ranks", missing[0], world_size) if missing else []


def _missing_rank(settings: Settings, name: str, rank: int, world_size: int) -> list[Problem]:
    is_free = settings.device == "cpu" and settings.num_machines == 1  # not limited by GPUs
    there = f"ranks are 0 to {world_size - 1}" if world_size > 1 else "the only rank is 0"
    more: list[str] = [change(settings, "num_processes", rank + 1)] if is_free else []
    return _problem(
        settings,
        Code.MISSING_RANK,
        f"{name} contains rank {rank}, but {there}",
        [removal(settings, name), *more],
        [name, "num_processes"],
    )


# problems of this machine


def _problems_here(settings: Settings, machine: Machine) -> list[Problem]:
    kind = kind_of(settings.device)
    if kind.is_numbered:
        return _gpu_problems(settings, machine)
    reason = machine.unavailable_reason(settings.device)
    if reason is None:
        return _precision_problems(settings, ())
    return _problem(
        settings,
        Code.NO_MPS,
        f"device is {settings.device!r}, but {kind.label} is not available: {reason}",
        [*([machine.mps_fix] if machine.mps_fix else []), _cpu_fix(settings)],
        ["device"],
    )


def _gpu_problems(settings: Settings, machine: Machine) -> list[Problem]:
    visible, count = machine.gpus_of(settings.device), settings.num_processes
    if not visible:
        from headway.machine.gpus import gpu_fixes

        asked = f"device is {settings.device!r}" + (f" for {count} processes" * (count > 1))
        if is_detected := _is_detected(settings, "device"):
            asked = "device is 'auto' and a GPU's driver is loaded"
        found = _problem(
            settings,
            Code.NO_GPU,
            f"{asked}, but no GPU is visible: {machine.unavailable_reason(settings.device)}",
            [*gpu_fixes(machine, settings.device), _cpu_fix(settings)],
            ["device", "num_processes"] if count > 1 else ["device"],
        )
        return [item._replace(where="device: auto") if is_detected else item for item in found]
    selection = settings.devices.select(visible)
    if selection.problems:
        labels = [label.removeprefix("GPU ") for label in gpu_labels(visible)]
        exists = ", ".join(f"{labels[i]} {gpu.name}" for i, gpu in enumerate(visible))
        return _problem(
            settings,
            Code.NO_SUCH_GPU,
            f"devices is {str(settings.devices)!r} ({settings.devices.describe()}), but "
            f"{'; '.join(selection.problems)}; {_visible(machine)}: {exists}",
            _device_fixes(settings, visible),
            ["devices"],
        )
    if not selection.indices:
        from headway.machine.gpus import gpu_fixes

        why = "; ".join(selection.skipped)
        return _problem(
            settings,
            Code.NO_USABLE_GPU,
            f"device is {settings.device!r}, but no GPU can be used: {why}; {_visible(machine)}",
            [*gpu_fixes(machine), _cpu_fix(settings)],
            ["device"],
        )
    return [
        *_process_count_problems(settings, machine, selection),
        *_precision_problems(settings, [visible[index] for index in selection.indices[:count]]),
    ]


def _device_fixes(settings: Settings, visible: Sequence[Gpu]) -> list[str]:
    """Return fixes that make the requested GPUs usable, and fixes that request other devices."""
    devices = settings.devices
    found = devices.select(visible).indices
    blocked = [visible[index] for index in found if visible[index].obstacle]
    remedies: list[str] = []
    if devices.may_become_idle(visible):
        remedies.append("wait for them with --wait")
    elif devices.named is not None and blocked:
        from headway.machine.gpus import availability_fixes

        remedies += availability_fixes(blocked[0])
    if all(gpu.obstacle for gpu in visible):
        return [*remedies, _cpu_fix(settings)]
    steps = [change(settings, "devices", "all", "or name GPUs that exist")]
    if settings.origin("num_processes").is_user_set:
        steps.append(removal(settings, "num_processes"))
    return [*remedies, " and ".join(steps)]


def _visible(machine: Machine) -> str:
    error = f" ({machine.mask_error})" if machine.mask_error else ""
    return f"visible on this machine: {machine.describe_gpus()}{error}"


def _process_count_problems(
    settings: Settings, machine: Machine, selection: Selection
) -> list[Problem]:
    processes, selected = settings.num_processes, len(selection.indices)
    visible, devices = machine.visible_gpus, settings.devices
    has_slices = any(visible[index].slice_of for index in selection.indices)
    if has_slices and max(processes, devices.size or 0) > 1:
        names = ["num_processes", "devices"] if processes > 1 else ["devices", "num_processes"]
        asked = f"num_processes is {processes}" if processes > 1 else f"devices is '{devices}'"
        one = change(settings, "num_processes", 1, "and launch once for each slice")
        return _problem(
            settings,
            Code.SEVERAL_MIG_SLICES,
            f"{asked}, but CUDA shows each process only one MIG slice, and NCCL cannot link slices",
            [f"{change(settings, 'devices', 1)} and {one}", "use GPUs without MIG"],
            names,
        )
    if processes <= selected or devices.size is not None:  # compared in `_device_problems`
        return []
    reason = _visible(machine)
    if selection.skipped:
        why = "; ".join(selection.skipped)
        reason = f"only {selected} of {len(visible)} GPUs can be used ({why})"
    return _problem(
        settings,
        Code.TOO_FEW_GPUS,
        f"num_processes is {processes}, but {reason}",
        [change(settings, "num_processes", selected), _cpu_fix(settings)],
        ["num_processes", "device"],
    )


def _precision_problems(settings: Settings, selected: Sequence[Gpu]) -> list[Problem]:
    name = settings.mixed_precision
    unsupported = kind_of(settings.device).unsupported(name, PRECISIONS[name], selected)
    if unsupported is None:
        return []
    return _problem(
        settings,
        Code.NO_BF16,
        f"mixed_precision is {settings.mixed_precision!r}, but {unsupported.reason}",
        [change(settings, "mixed_precision", unsupported.instead)],
        ["mixed_precision"],
    )


def _problem(
    settings: Settings,
    code: str,
    what: str,
    remedies: Sequence[str],
    names: Sequence[str],
    *,
    is_of_machine: bool = False,
) -> list[Problem]:
    """Return a problem with the settings `names`; the first is the one to change.

    Return no problem if one of these settings is invalid, because it is reported separately.
    """
    concerned = [name.partition(".")[0] for name in names]
    if any(name in settings.invalid for name in concerned):
        return []
    where = settings.where(*concerned)
    found = Problem(what, where, "; or ".join(remedies), code=code, names=tuple(names))
    return [found._replace(is_of_machine=is_of_machine)]


# the fixes


def change(settings: Settings, name: str, value: object, note: str = "") -> str:
    row, layer = TABLE[name], settings.origin(name).layer
    text = f"pass {row.as_flag(value)}"
    if layer is Layer.ENVIRONMENT:
        text = f"`export {row.variable}={value}`"
    elif layer in _IN_FILES:
        text = f"set `{name}: {value}`"
    return f"{text}, {note}" if note else text


def removal(settings: Settings, key: str, note: str = "") -> str:
    """Return the fix that removes a setting, or a variable of `env`, from its source."""
    name, _, variable = key.partition(".")
    row, origin = TABLE[name], settings.origin(name)
    text = f"remove {key}"
    if variable:
        held = {Layer.ENVIRONMENT: row.variable, Layer.FLAG: row.flag}
        text = f"remove {variable} from {held.get(origin.layer, f'`{name}`')}"
    elif origin.layer is Layer.ENVIRONMENT:
        text = f"`unset {row.variable}`"
    elif origin.layer is Layer.FLAG:
        text = f"omit {origin.flag or row.flag}"
    return f"{text}, {note}" if note else text


def _cpu_fix(settings: Settings) -> str:
    """Return the fix that selects the CPU and removes conflicting settings."""
    steps = [change(settings, "device", "cpu")]
    if settings.origin("devices").is_user_set:
        steps.append(removal(settings, "devices"))
    if settings.mixed_precision == "fp16":
        steps.append(change(settings, "mixed_precision", "bf16"))
    return " and ".join(steps)


def _one_machine_fix(settings: Settings) -> str:
    has_rank = settings.origin("machine_rank").is_user_set and bool(settings.machine_rank)
    rank = f" and {removal(settings, 'machine_rank')}" if has_rank else ""
    return change(settings, "num_machines", 1) + rank
