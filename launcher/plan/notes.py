"""Notes of a launch: what may be unexpected, before it starts; what was set in vain, at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from headway.contract.origin import Layer
from headway.contract.run import ACCELERATE
from headway.contract.strategies import HSDP, SHARDED
from headway.contract.strategies import SETTINGS as SHARING
from headway.devices.table import kind_of
from headway.errors import described
from headway.launcher.plan.accelerate import fsdp_variables, keeps_accelerate
from headway.launcher.plan.program import LIGHTNING, Program
from headway.launcher.plan.supervision import why_not_joined
from headway.launcher.plan.variables import counts_fastest_first
from headway.machine.facts import Machine
from headway.settings.table import NO, RAW, TABLE, Settings

if TYPE_CHECKING:
    from headway.contract.records import Uses


_FOR_ANY_RUNTIME = tuple(name for name in ACCELERATE if name != "device")
"""Settings of the Accelerator that other libraries may read from Accelerate's variables."""


def notes(
    settings: Settings, machine: Machine, program: Program, supervised: str | None, in_process: bool
) -> list[str]:
    """Return one sentence for each note."""
    return [
        *_without_effect(settings, program, supervised),
        *_of_another_runtime(settings, program),
        *_of_a_trainer(settings, program),
        *_of_unjoined_libraries(settings, program, supervised, in_process),
        *_about_gpus(settings, machine),
        *_unused_gpus(settings, machine),
        *_of_debugging(settings, program, supervised),
        *(_too_late(settings) if in_process else []),
    ]


def _unused_gpus(settings: Settings, machine: Machine) -> list[str]:
    """Explain why a machine with GPUs uses its CPU by default."""
    device, reason = machine.best_device()
    origin = settings.origin("device")
    is_best = origin.layer is Layer.DETECTED and not origin.variable
    if not machine.gpus or device != "cpu" or not is_best:
        return []
    from headway.machine.gpus import how_to_use_gpus

    gpus = f"{len(machine.gpus)} GPU" + "s" * (len(machine.gpus) > 1)
    return [f"{gpus} not used: {reason}; fix: {described(how_to_use_gpus(machine))}"]


_OF_THE_LAUNCHER = (
    "restart_delay",
    "grace_period_s",
    "leave_children",
    "ranks",
    "output",
    "status",
    "start_method",
)
"""Settings that only a launcher beside the script obeys, and that are no reason to have one."""


def _without_effect(settings: Settings, program: Program, supervised: str | None) -> list[str]:
    """List the settings for this launch that have no effect in it."""
    where: dict[str, str] = {}
    if supervised is None:
        where |= dict.fromkeys(_OF_THE_LAUNCHER, "on one process without --supervise")
    elif settings.max_restarts == 0:
        where["restart_delay"] = "without max_restarts"
    if supervised is not None and program.kind == "program":
        where["start_method"] = "with --no-python"
    if program.kind == "program" and settings.replace_accelerate != NO:
        where["replace_accelerate"] = "with --no-python"
    if settings.num_machines == 1:
        names = ("main_address", "main_port", "machine_timeout_s")
        where |= dict.fromkeys(names, "on one machine")
    if not kind_of(settings.device).is_numbered and settings.is_overridden("devices", "device"):
        where["devices"] = f"on {settings.device}, set by {settings.origin('device')}"
    if settings.device != "mps":
        where["mps_fallback"] = f"on {settings.device}"
    where |= _of_sharing(settings)
    if settings.debug_rank is not None and supervised is not None:
        where |= dict.fromkeys(("ranks", "output", "status", "hang_timeout"), "with debug_rank")
    elif settings.output == RAW and supervised is not None:
        where["status"] = f"with output {RAW}"
    return [
        f"{name} has no effect {place} ({settings.origin(name)})"
        for name, place in where.items()
        if settings.origin(name).is_for_this_launch or name in ("devices", "strategy")
    ]


def _of_another_runtime(settings: Settings, program: Program) -> list[str]:
    """Name what only Headway's Accelerator obeys, before a script that seems to make none."""
    names = sharing_asked(settings)
    is_obeyed = settings.replace_accelerate != NO or keeps_accelerate(settings, program)
    if not names or not program.imports or is_obeyed:
        return []
    values = listed(f"{name} {settings.values[name].value}" for name in names)
    hold = "holds" if len(names) == 1 else "hold"
    return [
        f"{values} {hold} for models that headway.Accelerator prepares; {program.name} trains with"
        f" {program.imports}, without Headway, unless a module that it imports makes an Accelerator"
        f" ({settings.where(*names)})"
    ]


def _of_a_trainer(settings: Settings, program: Program) -> list[str]:
    """Name what Accelerate obeys, and transformers' Trainer has an argument of its own for."""
    steps = settings.gradient_accumulation_steps
    if steps == 1 or not (program.libraries and keeps_accelerate(settings, program)):
        return []
    return [
        f"gradient_accumulation_steps {steps} holds for an Accelerator of the script; a Trainer"
        f" takes its own argument of that name ({settings.where('gradient_accumulation_steps')})"
    ]


def _of_unjoined_libraries(
    settings: Settings, program: Program, supervised: str | None, in_process: bool
) -> list[str]:
    """Say how a library is joined that only an installed module imports, if it is wanted."""
    wanted = [name for name in ("resume", "time_limit") if settings.values[name].value is not None]
    why = why_not_joined(settings, program, supervised, in_process)
    if not (wanted and why and program.imports):
        return []
    return [
        f"{listed(wanted)}: no Trainer of a library is joined in {program.name}: {why}"
        f" ({settings.where(*wanted)})"
    ]


def _of_sharing(settings: Settings) -> dict[str, str]:
    """Return which settings about sharding have no effect, and where."""
    is_alone = settings.num_processes * settings.num_machines == 1
    where = {}
    if settings.strategy in SHARDED and is_alone:
        where["strategy"] = "with one process: the model is not sharded"
    is_sharded = settings.strategy in SHARDED and not is_alone
    if settings.strategy != HSDP or is_alone:
        where["shard_size"] = "without strategy hsdp and several processes"
    if not is_sharded:
        where["cpu_offload"] = "where the model is not sharded"
    if not is_sharded and settings.activation_checkpointing == NO:
        where["wrap"] = "without sharding or activation_checkpointing"
    return where


def _about_gpus(settings: Settings, machine: Machine) -> Iterator[str]:
    if not kind_of(settings.device).is_numbered:
        return
    devices = settings.devices
    selection = devices.select(machine.visible_gpus)
    if settings.origin("devices").is_for_this_launch and devices.first is not None:
        yield f"devices {devices} = {devices.reading()}"
    if devices.idle is not None:
        yield f"devices {devices} = GPU {', '.join(map(str, selection.indices))}"
    yield from (f"skipped {reason}" for reason in selection.passed_over)
    if machine.mask_fault is not None:
        yield f"{machine.mask_fault}: {machine.describe_gpus()}"
    slices = sum(bool(gpu.slice_of) for gpu in machine.visible_gpus)
    if slices > 1 and devices.size is None:
        yield f"only one of {slices} MIG slices is used: CUDA shows a process only one"
    indices = [name for name in (*(devices.named or ()), *devices.without) if isinstance(name, int)]
    if machine.scheduler is not None and indices:
        yield (
            f"devices lists GPUs by index ({devices}; {settings.origin('devices')}), but "
            f"{machine.scheduler} assigns the GPUs of this node: a count such as "
            f"--devices {len(selection.indices)} works on any node"
        )
    mask = machine.mask or ""
    if counts_fastest_first(machine) and any(part.strip().isdecimal() for part in mask.split(",")):
        yield (
            f"CUDA_VISIBLE_DEVICES={mask} numbers the fastest GPU first, but nvidia-smi numbers by "
            "PCI bus; set CUDA_DEVICE_ORDER=PCI_BUS_ID to make them equal"
        )


def _of_debugging(settings: Settings, program: Program, supervised: str | None) -> Iterator[str]:
    if settings.debug_rank is None or supervised is None:
        return
    if settings.log_dir is not None:
        yield f"rank {settings.debug_rank} writes to the terminal, not to a log file"
    if program.kind == "program":
        yield (
            f"debug_rank does not disable timeouts in {program.name}, which is not a Python script"
        )


def _too_late(settings: Settings) -> list[str]:
    return [
        f"env sets {name}, which a process reads when it starts: no effect with --in-process"
        for name in settings.env
        if name.startswith(("PYTHON", "LD_", "DYLD_"))
    ]


# ------------------------------------------------------------------ after a successful run


def unused(settings: Settings, ranks: Sequence[Uses | None]) -> list[str]:
    """Return one note for all settings that had no effect, or none.

    `ranks` are what each rank on this machine has used. Nothing is said of what a library may have
    used, or where a rank did not report its end.
    """
    known = [uses for uses in ranks if uses is not None]
    if len(known) < len(ranks):
        return []
    has_reader = any(uses.readers for uses in known)
    parts = []
    if not any(uses.accelerator for uses in known):
        has_accelerate = any("accelerate" in uses.readers for uses in known)
        is_sharded = has_accelerate and bool(fsdp_variables(settings))
        parts += _without_accelerator(settings, has_reader, is_sharded)
    if not any(uses.resuming for uses in known):
        parts += _not_asked_for(settings, "resume", "neither accelerator.resume() nor")
    if not any(uses.stopping for uses in known):
        parts += _not_asked_for(settings, "time_limit", "neither accelerator.should_stop nor")
    if not any(uses.group for uses in known):
        has_lightning = any(one in LIGHTNING for uses in known for one in uses.readers)
        if has_lightning or not has_reader:
            parts += _without_group(settings, len(ranks), has_lightning)
    return ["; ".join(parts)] if parts else []


def sharing_asked(settings: Settings) -> list[str]:
    """Return the settings that ask for more than a copy of the model on each rank."""
    is_alone = settings.num_processes * settings.num_machines == 1
    is_sharded = settings.strategy in SHARDED and not is_alone
    asked = [name for name in SHARING if not _is_default(settings, name)]
    if not is_sharded:  # the others have no effect, which a note before the start says
        asked = [name for name in asked if name == "activation_checkpointing"]
    return asked


def _without_accelerator(settings: Settings, has_reader: bool, is_sharded: bool) -> list[str]:
    names = [
        name for name in (() if has_reader else _FOR_ANY_RUNTIME) if not _is_default(settings, name)
    ]
    names += [] if is_sharded else sharing_asked(settings)
    if not names:
        return []
    values = listed(f"{name} {settings.values[name].value}" for name in names)
    were = "was" if len(names) == 1 else "were"
    return [
        f"{values} {were} not used: the script made no Accelerator of Headway's"
        f" ({settings.where(*names)})"
    ]


def listed(parts: Iterable[str]) -> str:
    """Return the parts as one enumeration: a, b and c."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _not_asked_for(settings: Settings, name: str, neither: str) -> list[str]:
    if _is_default(settings, name):
        return []
    return [
        f"{name} was not used: the script calls {neither} accelerator.checkpoint(), and no Trainer"
        f" of a library was joined ({settings.where(name)})"
    ]


def _is_default(settings: Settings, name: str) -> bool:
    return bool(settings.values[name].value == TABLE[name].default)


def _without_group(settings: Settings, num_here: int, has_lightning: bool) -> list[str]:
    per_machine, machines = settings.num_processes, settings.num_machines
    count = per_machine * machines
    if count == 1 or (machines.is_range and num_here == 1):  # it may be the only one
        return []
    otherwise = "unless the script reads RANK"
    if has_lightning:
        nodes = f", num_nodes={machines}" if machines > 1 else ""
        otherwise = f"as Lightning was not given devices={per_machine}{nodes}"
    return [f"no rank joined a process group: all {count} ranks did the same work, {otherwise}"]
