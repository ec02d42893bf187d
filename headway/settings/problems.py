"""Checks of the settings against each other and against a machine, as a list of problems.

`resolve` reports values that cannot be parsed; `machine_problems` checks a machine alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.contract.origin import Layer, Origin
from headway.contract.run import RANK_VARIABLES
from headway.contract.run import VARIABLE as RUN_VARIABLE
from headway.devices.table import KINDS, kind_of
from headway.errors import Code, Problem
from headway.machine.devices import ALL
from headway.machine.facts import Machine
from headway.settings.profile import Entries, Entry
from headway.settings.remedies import change, on_cpu, on_one_machine, removal
from headway.settings.resolve import try_resolve
from headway.settings.setting import AUTO
from headway.settings.strategy_problems import strategy_problems
from headway.settings.table import Settings

SETTING_OF = {
    "ACCELERATE_USE_CPU": "device",
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    **{kind.mask: "devices" for kind in KINDS.values() if kind.mask},
    "PYTORCH_ENABLE_MPS_FALLBACK": "mps_fallback",
}
"""Variables that Headway derives from a setting, so that `env` may not set them."""


def problems(settings: Settings, machine: Machine | None = None) -> list[Problem]:
    """Return the problems that make a launch with these settings impossible.

    Args:
        settings: resolved.
        machine: the machine to launch on; None: check only what is independent of the machine.
    """
    found = [
        *_of_devices(settings, machine),
        *_of_machines(settings),
        *_of_variables(settings),
        *strategy_problems(settings, machine),
    ]
    # if num_processes is detected, another machine may have more ranks
    if machine is not None or settings.origin("num_processes").layer is not Layer.DETECTED:
        found += _of_ranks(settings)
    is_detected = settings.origin("device").layer is Layer.DETECTED
    if kind_of(settings.device).most_ranks == 1 and (machine is not None or not is_detected):
        several = _several_on_one(settings)
        found += [problem._replace(is_of_machine=is_detected) for problem in several]
    if machine is not None:
        from headway.settings.device_problems import device_problems

        found += device_problems(settings, machine)
    return found


def profile_problems(layers: Sequence[Entries], machine: Machine) -> Sequence[Problem]:
    """Return the problems that these profiles together have on every machine.

    Args:
        layers: from the weakest to the strongest.
        machine: supplies the values that are detected.
    """
    devices = [str(layer["device"].raw) for layer in layers if "device" in layer]
    if not devices or devices[-1].strip().lower() in (AUTO, "gpu"):  # GPUs allow the most
        gpus = Origin(Layer.DEFAULT, reason="a machine with GPUs")
        layers = [*layers, {"device": Entry(machine.gpu_kind, gpus)}]
    settings, unread = try_resolve(layers, machine, {})
    return [*unread, *problems(settings)]


def _of_devices(settings: Settings, machine: Machine | None) -> list[Problem]:
    found = []
    device, processes = settings.device, settings.num_processes
    kind = kind_of(device)
    is_detected = settings.origin("device").layer is Layer.DETECTED
    if settings.mixed_precision in kind.lacking:
        found += settings.problem(
            Code.FP16_ON_CPU,
            f"mixed_precision is {settings.mixed_precision!r}, but the CPU supports only bf16",
            [(change("mixed_precision", "bf16"),)],
            "mixed_precision",
            "device",
        )
    has_others = not is_detected and not kind.is_numbered and _may_have(settings, machine)
    is_only_one = kind.most_ranks == 1 and settings.devices.first == 1
    selects_gpus = settings.devices != ALL and not is_only_one
    is_meant = not settings.is_overridden("devices", "device")
    if not kind.is_numbered and selects_gpus and is_meant:
        found += settings.problem(
            Code.DEVICES_WITHOUT_CUDA,
            f"devices is {str(settings.devices)!r}, which selects GPUs, but device is {device!r}",
            [
                (removal("devices", "and set num_processes for several CPU ranks"),),
                *([(change("device", "auto"),)] if has_others else []),
            ],
            "devices",
            "device",
        )
    size = settings.devices.size
    both = kind.is_numbered and settings.are_user_set("devices", "num_processes")
    if both and size not in (None, processes):
        found += settings.problem(
            Code.DEVICES_OR_PROCESSES,
            f"devices selects {size} GPU{'s' * (size != 1)} ({settings.devices.reading()}), "
            f"but num_processes is {processes}",
            [(removal("num_processes"),), (change("num_processes", size),)],
            "devices",
            "num_processes",
        )
    return found


def _may_have(settings: Settings, machine: Machine | None) -> bool:
    """Return whether the requested GPUs can be those of this machine; None is any machine."""
    if machine is None:
        return True
    selection = settings.devices.select(machine.visible_gpus)
    has_slices = any(machine.visible_gpus[index].slice_of for index in selection.indices)
    return bool(selection.indices) and not selection.problems and not has_slices


def _several_on_one(settings: Settings) -> list[Problem]:
    one = (change("num_processes", 1),) if settings.num_processes > 1 else ()
    if settings.num_machines > 1:
        one = (*one, *on_one_machine(settings))
    if settings.num_processes * settings.num_machines == 1:
        return []
    return settings.problem(
        Code.SEVERAL_ON_MPS,
        f"num_processes is {settings.num_processes} on {settings.num_machines} machine(s), "
        f"but {kind_of(settings.device).label} supports only one process",
        [one, on_cpu(settings)],
        "num_processes",
        "num_machines",
        "device",
    )


def _of_machines(settings: Settings) -> list[Problem]:
    found = []
    machines, rank = settings.num_machines, settings.machine_rank
    if rank is not None and rank >= machines:
        found += settings.problem(
            Code.MACHINE_RANK,
            f"machine_rank is {rank}, but num_machines is {machines}"
            + (f": the ranks are 0 to {machines - 1}" if machines > 1 else ": the only rank is 0"),
            [
                (change("machine_rank", machines - 1, "which are counted from 0"),),
                (change("num_machines", rank + 1),),
            ]
            if machines > 1
            else [(removal("machine_rank", "or set num_machines to the number of machines"),)],
            "machine_rank",
            "num_machines",
        )
    if machines > 1 and settings.main_address is None:
        found += settings.problem(
            Code.NO_MAIN_ADDRESS,
            f"num_machines is {machines}, but main_address is not set",
            [
                (change("main_address", "HOST", "the host name or IP address of machine 0"),),
                on_one_machine(settings),
            ],
            "num_machines",
            "main_address",
        )
    return found


def _of_variables(settings: Settings) -> list[Problem]:
    found = []
    for name in settings.env:
        if name in RANK_VARIABLES or name == RUN_VARIABLE:
            found += settings.problem(
                Code.VARIABLE_OF_LAUNCHER,
                f"env sets {name}, which the launcher sets for each process",
                [(removal(f"env.{name}"),)],
                f"env.{name}",
            )
        if name in SETTING_OF:
            found += settings.problem(
                Code.VARIABLE_OF_SETTING,
                f"env sets {name}, which Headway derives from the setting {SETTING_OF[name]}",
                [(removal(f"env.{name}", f"and set {SETTING_OF[name]} instead"),)],
                f"env.{name}",
                SETTING_OF[name],
            )
    if "OMP_NUM_THREADS" in settings.env and settings.are_user_set("threads_per_process"):
        found += settings.problem(
            Code.THREADS_TWICE,
            f"threads_per_process is {settings.threads_per_process}, but env sets "
            f"OMP_NUM_THREADS={settings.env['OMP_NUM_THREADS']}",
            [(removal("threads_per_process"),), (removal("env.OMP_NUM_THREADS"),)],
            "threads_per_process",
            "env.OMP_NUM_THREADS",
        )
    return found


def _of_ranks(settings: Settings) -> list[Problem]:
    """Return the problems of the ranks to show and the rank to debug."""
    if settings.num_machines > 1:
        if settings.debug_rank is None:
            return []
        return settings.problem(
            Code.DEBUG_ON_MACHINES,
            f"debug_rank is {settings.debug_rank}, but num_machines is "
            f"{settings.num_machines}: the ranks of other machines would not wait for it",
            [(removal("debug_rank"),), on_one_machine(settings)],
            "debug_rank",
            "num_machines",
        )
    processes, debug_rank = settings.num_processes, settings.debug_rank
    found = missing_ranks(settings, processes)
    if debug_rank is not None and debug_rank >= processes:
        found += _missing_rank(settings, "debug_rank", debug_rank, processes)
    return found


def missing_ranks(settings: Settings, world_size: int) -> list[Problem]:
    """Return the problem if `ranks` contains a rank that is not below `world_size`."""
    missing = [rank for rank in settings.ranks or () if rank >= world_size]
    return _missing_rank(settings, "ranks", missing[0], world_size) if missing else []


def _missing_rank(settings: Settings, name: str, rank: int, world_size: int) -> list[Problem]:
    is_free = settings.device == "cpu" and settings.num_machines == 1  # else GPUs limit them
    there = f"ranks are 0 to {world_size - 1}" if world_size > 1 else "the only rank is 0"
    return settings.problem(
        Code.MISSING_RANK,
        f"{name} contains rank {rank}, but {there}",
        [
            (removal(name),),
            *([(change("num_processes", rank + 1),)] if is_free else []),
        ],
        name,
        "num_processes",
    )
