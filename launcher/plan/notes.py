"""Notes on unexpected facts before a launch starts, and on unused settings after it succeeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from headway.devices.table import kind_of
from headway.ipc.choices import HSDP, SHARDED
from headway.ipc.origin import Layer
from headway.ipc.run_contract import ACCELERATE, RANK_VARIABLES
from headway.ipc.run_contract import VARIABLE as RUN_VARIABLE
from headway.launcher.plan.plan import LaunchPlan, counted
from headway.machine.devices import gpu_labels
from headway.settings.setting import Scope
from headway.settings.table import NO, RAW, TABLE, Settings

if TYPE_CHECKING:
    from headway.ipc.records import FeatureUse


def notes(plan: LaunchPlan) -> tuple[str, ...]:
    return tuple(note for rule in NOTES for note in rule(plan))


def _without_effect(plan: LaunchPlan) -> Iterator[str]:
    settings, kind = plan.settings, kind_of(plan.settings.device)
    shards = settings.strategy in SHARDED
    is_sharded = shards and not plan.is_alone
    is_hybrid = settings.strategy == HSDP and not plan.is_alone
    uses_blocks = is_sharded or settings.activation_checkpointing != NO
    is_moved = not kind.is_numbered and settings.is_overridden("devices", "device")
    is_debugged = plan.supervised is not None and settings.debug_rank is not None
    conditions: tuple[tuple[Iterable[str], bool, str], ...] = (
        (_of("launcher"), plan.supervised is None, "with one process and without --supervise"),
        (_of("machines"), plan.is_one_machine, "on one machine"),
        (_of("gpus"), is_moved, f"on {settings.device}, set by {settings.origin('device')}"),
        (_of("ranks"), shards and plan.is_alone, "with one process: the model is not sharded"),
        (_of("hsdp"), not is_hybrid, "without strategy hsdp and several processes"),
        (_of("shards"), not is_sharded, "where the model is not sharded"),
        (_of("blocks"), not uses_blocks, "without sharding or activation_checkpointing"),
        (("restart_delay",), settings.max_restarts == 0, "without max_restarts"),
        (("ranks", "output", "status", "hang_timeout"), is_debugged, "with debug_rank"),
        (("status",), settings.output == RAW, f"with output {RAW}"),
        (("start_method", "replace_accelerate"), not plan.program.is_python, "with --no-python"),
    )
    where: dict[str, str] = {}  # the first condition for each setting
    for names, is_met, condition in conditions:
        if is_met:
            where = dict.fromkeys(names, condition) | where
    for name in filter(where.get, TABLE):
        origin = settings.origin(name)
        if origin.is_for_this_launch or name in ("devices", "strategy"):
            yield f"{name} has no effect {where[name]} ({origin})"


def _of(scope: Scope) -> list[str]:
    return [name for name, row in TABLE.items() if row.applies_to == scope]


def _selected_gpus(plan: LaunchPlan) -> Iterator[str]:
    """Explain which GPUs are selected, and which are skipped or unused."""
    settings, machine = plan.settings, plan.machine
    if not kind_of(settings.device).is_numbered:
        return
    devices = settings.devices
    selection = devices.select(machine.visible_gpus)
    if settings.origin("devices").is_for_this_launch and devices.first is not None:
        yield f"devices {devices} = {devices.describe()}"
    if devices.idle is not None:
        gpus, labels = machine.visible_gpus, gpu_labels(machine.visible_gpus)
        yield f"devices {devices} = {', '.join(labels[index] for index in selection.indices)}"
        for index in selection.indices:
            if (use := gpus[index].use) is not None and None in use[:2]:
                yield f"{labels[index]} may be in use: its driver reports only part of its usage"
    yield from (f"skipped {reason}" for reason in selection.skipped)
    if machine.mask_error is not None:
        yield f"{machine.mask_error}: {machine.describe_gpus()}"
    if kernels := machine.missing_kernels([machine.visible_gpus[index] for index in plan.gpus]):
        from headway.machine.gpus import kernel_fixes

        yield f"{kernels}; fix: {'; or '.join(kernel_fixes(machine))}"
    if machine.driver_fault:
        yield f"{kind_of(settings.device).tool} reports: {machine.driver_fault}"
    slices = sum(bool(machine.visible_gpus[index].slice_of) for index in selection.indices)
    if slices > 1 and devices.size is None:
        yield f"only one of {slices} MIG slices is used: CUDA exposes only one to a process"


def _unused_gpus(plan: LaunchPlan) -> Iterator[str]:
    device, reason = plan.machine.best_device()
    origin = plan.settings.origin("device")
    is_best = origin.layer is Layer.DETECTED and not origin.variable
    if not is_best or device != "cpu":
        return
    if plan.machine.unused_card:
        yield f"{plan.machine.unused_card}; fix: install the driver"
    if plan.machine.gpus or plan.machine.has_driver:
        from headway.machine.gpus import gpu_fixes

        count = len(plan.machine.gpus)
        gpus = f"{count} GPU{'s' * (count > 1)} not used" if count else "no GPU is used"
        yield f"{gpus}: {reason}; fix: {'; or '.join(gpu_fixes(plan.machine))}"


def oversubscribed(plan: LaunchPlan) -> Iterator[str]:
    processes, cores = plan.settings.num_processes, plan.machine.cores
    if processes > 2 * cores:
        yield f"{processes} processes oversubscribe {counted(cores, 'core', 'cores')}"


def _bound_threads(plan: LaunchPlan) -> Iterator[str]:
    """Explain that OpenMP binds the same cores in each rank, because it knows no other ranks."""
    for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY"):
        value = plan.settings.env.get(name) or plan.inherited.get(name, "")
        if plan.settings.num_processes > 1 and value.lower() not in ("", "false"):
            yield f"{name}={value} binds the threads of all ranks to the same cores; unset it"


def _late_variables(plan: LaunchPlan) -> Iterator[str]:
    for name in plan.settings.env if plan.in_process else ():
        if name.startswith(("PYTHON", "LD_", "DYLD_")):
            yield (
                f"env sets {name}, which has no effect with --in-process: such variables are read "
                "only when a process starts"
            )


def _removed_variables(plan: LaunchPlan) -> Iterator[str]:
    names = [name for name in RANK_VARIABLES if {name} <= plan.inherited.keys() & plan.environment]
    if names and plan.task is None and RUN_VARIABLE not in plan.inherited:
        text = "variables not passed to the script, because each launch sets its own"
        yield f"{text}: {', '.join(names)}"


def _lone_pod(plan: LaunchPlan) -> Iterator[str]:
    variables, origin = plan.inherited, plan.settings.origin("num_machines")
    index = variables.get("JOB_COMPLETION_INDEX")
    if index is None or "KUBERNETES_SERVICE_HOST" not in variables or RUN_VARIABLE in variables:
        return
    if origin.layer is Layer.DETECTED and not plan.settings.origin("cluster").is_user_set:
        yield (
            f"this pod has index {index} of an indexed Job and trains alone; to train together, "
            "set num_machines and main_address"
        )


NOTES: tuple[Callable[[LaunchPlan], Iterable[str]], ...] = (
    _without_effect,
    _selected_gpus,
    _unused_gpus,
    oversubscribed,
    _bound_threads,
    _late_variables,
    _removed_variables,
    _lone_pod,
)


# ------------------------------------------------------------------ after a successful run


def final_notes(plan: LaunchPlan, ranks: Sequence[FeatureUse | None]) -> list[str]:
    """Return the note on unused settings, and the notes that the ranks logged during the run."""
    first = unused(plan.settings, ranks, mentions_rank=plan.program.mentions_rank)
    return [*first, *(note for uses in ranks if uses for note in uses.notes)]


def unused(
    settings: Settings, ranks: Sequence[FeatureUse | None], mentions_rank: bool = False
) -> list[str]:
    """Return a list with one note on all settings that had no effect, or an empty list.

    `ranks` holds each local rank's report of the features that it used. If any rank sent no report,
    the returned list is empty. Settings that a library may have used are skipped.
    """
    known = [uses for uses in ranks if uses is not None]
    if len(known) < len(ranks) or not ranks:
        return []
    readers = {name for uses in known for name in uses.readers}
    parts = []
    if not any(uses.accelerator for uses in known):
        parts += _without_accelerator(settings, has_reader=bool(readers))
    calls = (
        ("resume", "resume()", any(uses.resuming for uses in known)),
        ("time_limit", "should_stop", any(uses.stopping for uses in known)),
    )
    parts += [
        f"{name} was not used: the script calls neither accelerator.{call} nor "
        f"accelerator.checkpoint(), and no library's Trainer was hooked ({settings.where(name)})"
        for name, call, is_called in calls
        if not (is_called or _is_default(settings, name))
    ]
    count = settings.num_processes * settings.num_machines
    # if num_machines is a range, this may be the only machine
    is_alone = count == 1 or (settings.num_machines.is_range and len(ranks) == 1)
    if not (is_alone or any(uses.group for uses in known)):
        fix = "headway.Accelerator trains one model on all ranks"
        if any("lightning" in name for name in readers):
            sizes = f"devices={settings.num_processes}, num_nodes={settings.num_machines}"
            fix = f"pass {sizes} to Lightning's Fabric or Trainer"
        parts.append(
            f"no rank joined a process group: each of the {count} ranks ran the whole script"
            + f"{', unless the script reads RANK' * mentions_rank}; {fix}"
        )
    return ["; ".join(parts)] if parts else []


def _without_accelerator(settings: Settings, *, has_reader: bool) -> list[str]:
    """Return a note on unused Accelerator settings, except those that a library may have read."""
    is_alone = settings.num_processes * int(settings.num_machines) == 1
    is_sharded = settings.strategy in SHARDED and not is_alone
    scopes: set[Scope | None] = {"accelerator"}
    if is_sharded:  # otherwise a note before the start covers them
        scopes |= {"ranks", "hsdp", "shards", "blocks"}
    names = [
        name
        for name, row in TABLE.items()
        if row.applies_to in scopes
        and not _is_default(settings, name)
        and not (has_reader and name in ACCELERATE)
    ]
    if not names:
        return []
    *first, last = [f"{name} {settings.values[name].value}" for name in names]
    values = f"{', '.join(first)} and {last} were" if first else f"{last} was"
    return [
        f"{values} not used: the script created no Headway Accelerator ({settings.where(*names)})"
    ]


def _is_default(settings: Settings, name: str) -> bool:
    return bool(settings.values[name].value == TABLE[name].default)
