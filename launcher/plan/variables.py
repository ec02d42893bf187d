"""The environment variables that a plan sets or removes, each with its origin."""

from __future__ import annotations

from collections.abc import Callable

from headway.devices.kind import numbers
from headway.devices.table import CUDA, kind_of
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import (
    ACCELERATE,
    ALLOCATION_VARIABLE,
    FLIGHT_RECORDER,
    KEY_VARIABLE,
    RANK_VARIABLES,
    Ranks,
    RunContract,
    encode,
    rank_variables,
)
from headway.launcher.plan.plan import LaunchPlan
from headway.machine.facts import Machine
from headway.settings.resolve import omp_threads
from headway.settings.setting import Value
from headway.settings.table import TABLE, YES, Settings

LOOPBACK = "127.0.0.1"
_MIN_P2P_DRIVER = (550, 40, 7)  # the first driver that reports P2P correctly
_ORDER = "CUDA_DEVICE_ORDER"

Variables = dict[str, Value]
"""Changes to the environment; a value of None removes a variable."""


def variables_of(plan: LaunchPlan) -> Variables:
    changes: Variables = {}
    for rule in RULES:
        found = rule(plan)
        if rule in _DEFAULTS:
            shell = {name for name, text in plan.inherited.items() if text}
            found = {n: new for n, new in found.items() if new.origin.is_user_set or n not in shell}
        changes |= found
    return changes


def _contract(plan: LaunchPlan) -> Variables:
    """Set HEADWAY_RUN, which contains the settings for the script's process."""
    settings = plan.settings
    names = [name for name in RunContract._fields if name in TABLE]
    values = {name: settings.values[name].value for name in names}
    yes = {name: value == YES for name, value in values.items() if YES in TABLE[name].choices}
    run = RunContract(
        **{**values, **yes},
        origins={name: settings.origin(name) for name in names},
        began_at=plan.began_at,
    )
    if plan.supervised is None:
        run = run._replace(debug_rank=None)
    return {"HEADWAY_RUN": _default(encode(run), "the launcher")}


def _accelerate(plan: LaunchPlan) -> Variables:
    """Set the variables that `accelerate launch` sets and that Accelerate's runtime reads."""
    settings, steps = plan.settings, "gradient_accumulation_steps"
    changes = {variable: _from(settings, name) for name, variable in ACCELERATE.items()}
    on_cpu = str(settings.device == "cpu").lower()
    changes[ACCELERATE["device"]] = _from(settings, "device", on_cpu)
    if settings.origin(steps).layer is Layer.DEFAULT:  # does not override the script's argument
        del changes[ACCELERATE[steps]]
    return changes


def _threads(plan: LaunchPlan) -> Variables:
    settings, name = plan.settings, "threads_per_process"
    threads = omp_threads(settings.env) or omp_threads(plan.inherited)
    if threads is not None and settings.origin(name).layer is Layer.DETECTED:
        return {}
    return {"OMP_NUM_THREADS": _from(settings, name)}


def _hidden_gpus(plan: LaunchPlan) -> Variables:
    """Hide the GPUs from a script that trains on the CPU but may detect GPUs itself."""
    machine, gpu = plan.machine, kind_of(plan.machine.gpu_kind)
    may_have_gpus = (machine.gpus or machine.has_driver) and not machine.is_hidden
    if plan.settings.device != "cpu" or not may_have_gpus or gpu.empty_mask is None:
        return {}
    hidden = gpu.empty_mask if machine.mask_variable == gpu.mask else "-1"
    return {machine.mask_variable: _from(plan.settings, "device", hidden)}


def _device_defaults(plan: LaunchPlan) -> Variables:
    kind = kind_of(plan.settings.device)
    if not plan.inherited.keys().isdisjoint((kind.mask, *kind.variables)):
        return {}
    return {name: _default(text, reason) for name, (text, reason) in kind.variables.items()}


def _gpu_mask(plan: LaunchPlan) -> Variables:
    if not plan.gpus:
        return {}
    machine, visible = plan.machine, plan.machine.visible_gpus
    has_slices = any(gpu.is_mig for gpu in machine.gpus)  # CUDA's indices do not count slices
    changes: Variables = {}
    if has_slices or plan.gpus != tuple(range(len(visible))):
        names = [(has_slices and gpu.uuid) or name for name, gpu in machine.named_gpus]
        mask = ",".join(names[index] for index in plan.gpus)
        changes[machine.mask_variable] = _from(plan.settings, "devices", mask)
    if _orders_gpus_by_speed(machine) and machine.mask is None and _ORDER not in plan.inherited:
        changes[_ORDER] = _default("PCI_BUS_ID", "the GPU models differ: use nvidia-smi's order")
    return changes


def _without_p2p(plan: LaunchPlan) -> Variables:
    """Like `accelerate launch`, disable P2P and InfiniBand if the driver wrongly reports P2P."""
    machine = plan.machine
    names = [machine.visible_gpus[index].name for index in plan.gpus]
    if len(names) < 2 or not any("RTX 40" in name for name in names):
        return {}
    if machine.driver is None or numbers(machine.driver) >= _MIN_P2P_DRIVER:
        return {}
    absent = _default("1", "drivers before 550.40.07 wrongly report that RTX 40 cards support P2P")
    return dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"), absent)


def _outer_launch(plan: LaunchPlan) -> Variables:
    """Remove variables left over from another launch, and variables that only launchers read.

    If RANK is not set and the script will not be a rank, the variables of other launches are kept
    for the script's child processes.
    """
    is_stale = plan.is_rank or "RANK" in plan.inherited
    stale = _default(None, "left over from another launch")
    changes = {name: stale for name in RANK_VARIABLES if is_stale and name in plan.inherited}
    if KEY_VARIABLE in plan.inherited:
        changes[KEY_VARIABLE] = _default(None, "for launchers only")
    if plan.job:
        changes[ALLOCATION_VARIABLE] = _default(f"{plan.job}:", "job id for launches inside ranks")
    return changes


def _under_launcher(plan: LaunchPlan) -> Variables:
    changes: Variables = {}
    if plan.supervised is not None:
        changes["PYTHONUNBUFFERED"] = _default("1", "output goes through pipes")
    if not plan.is_alone:
        reason = "records the last collectives, to explain a hang"
        changes[FLIGHT_RECORDER[0]] = _default(FLIGHT_RECORDER[1], reason)
    return changes


def _loopback(plan: LaunchPlan) -> Variables:
    """Use the loopback interface if all ranks are on this machine, even with several agents."""
    address = plan.settings.main_address or ""
    is_local = plan.is_one_machine or address == "localhost" or address.startswith("127.")
    if not (plan.is_rank and is_local):
        return {}
    interface = "lo0" if plan.machine.system == "Darwin" else "lo"
    local = _default(interface, "all ranks are on this machine")
    return dict.fromkeys(kind_of(plan.settings.device).interfaces, local)


def _debugging(plan: LaunchPlan) -> Variables:
    if plan.settings.debug_rank is None:
        return {}
    variables = kind_of(plan.settings.device).debug_variables
    return {name: _from(plan.settings, "debug_rank", text) for name, text in variables.items()}


def _env(plan: LaunchPlan) -> Variables:
    return {name: _from(plan.settings, "env", text) for name, text in plan.settings.env.items()}


def _rank_variables(plan: LaunchPlan) -> Variables:
    """Set the variables of a single rank, or of a rank that the scheduler started."""
    task, settings = plan.task, plan.settings
    if plan.is_single_rank:
        alone = rank_variables(Ranks())
        return {name: _from(settings, "num_processes", text) for name, text in alone.items()}
    if task is None:
        return {}
    origin = settings.origin("cluster")
    variables = rank_variables(task, settings.machine_rank or 0, settings.num_machines)
    place = {
        "MASTER_ADDR": _from(settings, "main_address", settings.main_address or LOOPBACK),
        "MASTER_PORT": _from(settings, "main_port"),
    }
    return {name: Value(text, origin) for name, text in variables.items()} | place


RULES: tuple[Callable[[LaunchPlan], Variables], ...] = (
    _contract,
    _accelerate,
    _threads,
    _hidden_gpus,
    _device_defaults,
    _gpu_mask,
    _without_p2p,
    _outer_launch,
    _under_launcher,
    _loopback,
    _debugging,
    _env,
    _rank_variables,
)
"""If two rules set the same variable, the later one overrides the other."""

_DEFAULTS = (_accelerate, _hidden_gpus, _device_defaults, _without_p2p, _under_launcher, _loopback)
"""Rules that override a variable from the shell only if the user set the value."""


def _default(value: str | None, reason: str) -> Value:
    return Value(value, Origin(Layer.DEFAULT, reason=reason))


def _from(settings: Settings, name: str, value: str | None = None) -> Value:
    text = str(settings.values[name].value) if value is None else value
    return Value(text, settings.origin(name))


def _orders_gpus_by_speed(machine: Machine) -> bool:
    """Return whether CUDA's GPU order may differ from that of the driver's tools.

    Source: NVIDIA, CUDA C++ Programming Guide, environment variables: CUDA_DEVICE_ORDER.
    """
    models = {gpu.name for gpu in machine.gpus}
    is_nvidia = machine.gpu_kind == CUDA.name and not machine.is_rocm and not machine.is_by_torch
    return len(models) > 1 and is_nvidia
