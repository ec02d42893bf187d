"""Resolved settings + a machine -> a frozen LaunchPlan. Pure: no I/O, no torch.

Everything that cannot be honoured is refused here, with all reasons at once; nothing is changed
quietly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headway import contract
from headway.contract import RunContract
from headway.errors import ConfigError, MachineError, Problem
from headway.machine import Machine
from headway.resolve import threads_given_by
from headway.settings import TABLE, Origin, Settings, Value

RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""torch's names for a process's place in the group; the launcher alone sets them."""

_SETTING_OF = {
    "ACCELERATE_USE_CPU": "device",
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "CUDA_VISIBLE_DEVICES": "devices",
}
"""Variables that follow from a setting, and may not be set beside it."""

LOOPBACK = "127.0.0.1"

_FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"


class Program(NamedTuple):
    """What the user wants to run, and the arguments that are the program's own."""

    name: str  # a path, or a module's name
    args: tuple[str, ...] = ()
    kind: str = "script"  # script, module, or program for what is no Python

    def command(self, python: str) -> list[str]:
        """Return the argv that runs it."""
        dashes = ["--"] if self.name.startswith("-") else []
        before = {"script": [python, *dashes], "module": [python, "-m"], "program": []}
        return [*before[self.kind], self.name, *self.args]


class LaunchPlan(NamedTuple):
    """All that a launch will do; `describe` prints one, `run` carries one out."""

    program: Program
    python: str
    settings: Settings
    gpus: tuple[int, ...]  # indices among the visible GPUs, one for each process
    supervised: str | None  # why a launcher stays beside the script; None: the script replaces it
    in_process: bool  # nor replaces it: the script runs in the launcher's interpreter
    environment: Mapping[str, Value]  # what changes; a value of None means removed
    notes: tuple[str, ...]

    @property
    def is_one_machine(self) -> bool:
        """True when all ranks run here, so that nothing needs to leave the loopback device."""
        return self.settings.num_machines == 1


def build_plan(
    settings: Settings,
    machine: Machine,
    program: Program,
    *,
    python: str,
    environ: Mapping[str, str],
    supervise: bool = False,
    in_process: bool = False,
) -> LaunchPlan:
    """Return the plan of one launch.

    Args:
        settings: resolved.
        machine: this machine, or a recorded one.
        program: the user's script or module.
        python: the interpreter that runs it.
        environ: what the processes would inherit.
        supervise: keep the launcher beside a single process.
        in_process: run a single process in this interpreter.

    Raises:
        ConfigError: settings contradict each other.
        MachineError: this machine cannot do what they ask.
    """
    contradictions = _contradictions(settings)
    if in_process:
        contradictions += _contradictions_in_process(settings, program, supervise)
    impossible = _impossible_here(settings, machine)
    if contradictions or impossible:
        raise (ConfigError if contradictions else MachineError).of(contradictions + impossible)
    gpus = _selected_gpus(settings, machine)[: settings.num_processes]
    supervised = _why_supervised(settings, supervise)
    return LaunchPlan(
        program=program,
        python=python,
        settings=settings,
        gpus=gpus,
        supervised=supervised,
        in_process=in_process,
        environment=_environment(settings, machine, gpus, supervised, environ),
        notes=tuple(_notes(settings, program, supervised, in_process)),
    )


def refuse_missing_ranks(settings: Settings, world_size: int) -> None:
    """Refuse ranks on the console that are not there; only at the rendezvous is it known how many
    several machines have.

    Raises:
        ConfigError: `ranks` names one that is not below `world_size`.
    """
    if problems := _missing_ranks(settings, world_size):
        raise ConfigError.of(problems)


def _selected_gpus(settings: Settings, machine: Machine) -> tuple[int, ...]:
    if settings.device != "cuda":
        return ()
    return settings.devices.select(len(machine.visible_gpus))


def _said(settings: Settings, *names: str) -> bool:
    """True when somebody set all of these, rather than a default or a detection."""
    return all(settings.origin(name).layer not in ("default", "detected") for name in names)


def _where(settings: Settings, *names: str) -> str:
    return "; ".join(f"{name}: {settings.origin(name)}" for name in names)


def _contradictions(settings: Settings) -> list[Problem]:
    problems = []
    device, processes = settings.device, settings.num_processes
    if device == "cpu" and settings.mixed_precision == "fp16":
        problems.append(
            Problem(
                "mixed_precision is 'fp16', but on a CPU only bf16 is supported",
                _where(settings, "mixed_precision", "device"),
                "set `mixed_precision: bf16`, or pass --mixed-precision bf16",
            )
        )
    if device != "cuda" and _said(settings, "devices"):
        problems.append(
            Problem(
                f"devices is {str(settings.devices)!r}, but it selects GPUs, "
                f"and device is {device!r}",
                _where(settings, "devices", "device"),
                "for several CPU ranks set num_processes; for GPUs set `device: cuda`",
            )
        )
    if device == "cuda" and _said(settings, "devices", "num_processes"):
        selected = settings.devices.select(processes)
        if len(selected) != processes:
            problems.append(
                Problem(
                    f"devices selects {len(selected)} GPUs ({settings.devices.reading()}), "
                    f"but num_processes is {processes}",
                    _where(settings, "devices", "num_processes"),
                    "leave one of the two out, or make them agree",
                )
            )
    problems += _contradictions_of_machines(settings)
    problems += _contradictions_of_ranks(settings)
    for name in settings.env:
        if name in RANK_VARIABLES or name == contract.VARIABLE:
            problems.append(
                Problem(
                    f"env sets {name}, which the launcher sets for each process",
                    _where(settings, "env"),
                    f"remove {name} from `env`",
                )
            )
        if name in _SETTING_OF:
            problems.append(
                Problem(
                    f"env sets {name}, which follows from the setting {_SETTING_OF[name]}",
                    _where(settings, "env", _SETTING_OF[name]),
                    f"set {_SETTING_OF[name]} instead",
                )
            )
    if "OMP_NUM_THREADS" in settings.env and _said(settings, "threads_per_process"):
        problems.append(
            Problem(
                f"threads_per_process is {settings.threads_per_process}, but env sets "
                f"OMP_NUM_THREADS={settings.env['OMP_NUM_THREADS']}",
                _where(settings, "threads_per_process", "env"),
                "leave one of the two out",
            )
        )
    return problems


def _contradictions_of_machines(settings: Settings) -> list[Problem]:
    machines, rank = settings.num_machines, settings.machine_rank
    if rank >= machines:
        return [
            Problem(
                f"machine_rank is {rank}, but with num_machines {machines} "
                + (f"it is from 0 to {machines - 1}" if machines > 1 else "the only machine is 0"),
                _where(settings, "machine_rank", "num_machines"),
                "give every machine its own rank, counted from 0, and the same num_machines",
            )
        ]
    if machines > 1 and settings.main_address is None:
        return [
            Problem(
                f"num_machines is {machines}, but nobody says where machine 0 is",
                _where(settings, "num_machines"),
                "pass --main-address with the name or IP address of machine 0, on every machine",
            )
        ]
    return []


def _contradictions_of_ranks(settings: Settings) -> list[Problem]:
    if settings.num_machines > 1:
        if settings.debug_rank is None:
            return []
        return [
            Problem(
                f"debug_rank is {settings.debug_rank}, but num_machines is "
                f"{settings.num_machines}: the ranks of other machines would not wait for it",
                _where(settings, "debug_rank", "num_machines"),
                "debug on one machine; --cpu --num-processes N gives it N ranks",
            )
        ]
    processes, debug_rank = settings.num_processes, settings.debug_rank
    problems = _missing_ranks(settings, processes)
    if debug_rank is not None and debug_rank >= processes:
        problems.append(_missing_rank(settings, "debug_rank", debug_rank, processes))
    return problems


def _missing_ranks(settings: Settings, world_size: int) -> list[Problem]:
    missing = [rank for rank in settings.ranks or () if rank >= world_size]
    return [_missing_rank(settings, "ranks", missing[0], world_size)] if missing else []


def _missing_rank(settings: Settings, name: str, rank: int, world_size: int) -> Problem:
    there = f"ranks are from 0 to {world_size - 1}" if world_size > 1 else "the only rank is 0"
    return Problem(
        f"{name} names rank {rank}, but {there}",
        _where(settings, name, "num_processes"),
        "leave it out, or start more processes",
    )


def _contradictions_in_process(
    settings: Settings, program: Program, supervise: bool
) -> list[Problem]:
    problems = []
    why = _why_supervised(settings, supervise)
    if why is not None:
        name = _setting_for_a_launcher(settings)
        origin = "flag --supervise" if name is None else _where(settings, name)
        problems.append(
            Problem(
                f"--in-process runs one process with no launcher beside it, but {why}",
                f"flag --in-process; {origin}",
                "pass --num-processes 1, and leave out what needs a launcher",
            )
        )
    if program.kind == "program":
        problems.append(
            Problem(
                f"--in-process runs Python, and {program.name} is a program of its own",
                "flag --in-process; flag --no-python",
                "leave one of the two out",
            )
        )
    return problems


def _impossible_here(settings: Settings, machine: Machine) -> list[Problem]:
    if settings.device == "mps":
        return _impossible_on_mps(settings, machine)
    if settings.device == "cuda":
        return _impossible_on_cuda(settings, machine)
    return []


def _impossible_on_mps(settings: Settings, machine: Machine) -> list[Problem]:
    if not machine.mps:
        return [
            Problem(
                f"device is 'mps', but this machine has none: {machine.mps_reason}",
                _where(settings, "device"),
                "set `device: auto`, or pass --cpu",
            )
        ]
    if settings.num_processes * settings.num_machines > 1:
        return [
            Problem(
                f"num_processes is {settings.num_processes} on {settings.num_machines} machine(s), "
                "but MPS is one device in one process, without a process group",
                _where(settings, "num_processes", "num_machines", "device"),
                f"use one process, or CPU ranks: --cpu --num-processes {settings.num_processes}",
            )
        ]
    return []


def _impossible_on_cuda(settings: Settings, machine: Machine) -> list[Problem]:
    visible = machine.visible_gpus
    if not visible:
        hidden = f"CUDA_VISIBLE_DEVICES={machine.cuda_visible_devices!r} hides them"
        reason = hidden if machine.gpus else machine.gpus_reason
        return [
            Problem(
                f"device is 'cuda', but this machine shows no GPU: {reason}",
                _where(settings, "device"),
                "unset CUDA_VISIBLE_DEVICES"
                if machine.gpus
                else "set `device: auto`, or pass --cpu",
            )
        ]
    problems = []
    exists = ", ".join(f"{index} {gpu.name}" for index, gpu in enumerate(visible))
    selected = settings.devices.select(len(visible))
    missing = [index for index in selected if index >= len(visible)]
    if missing:
        problems.append(
            Problem(
                f"devices is {str(settings.devices)!r} ({settings.devices.reading()}), but this "
                f"machine shows {machine.describe_gpus()}: {exists}",
                _where(settings, "devices"),
                "name GPUs that exist, or `devices: all`",
            )
        )
    elif settings.num_processes > len(selected):
        problems.append(
            Problem(
                f"num_processes is {settings.num_processes}, but this machine shows "
                f"{machine.describe_gpus()}",
                _where(settings, "num_processes", "device"),
                f"--num-processes {len(selected)}, or CPU ranks: --cpu --num-processes "
                f"{settings.num_processes}",
            )
        )
    elif settings.mixed_precision == "bf16":
        for index in selected[: settings.num_processes]:
            gpu = visible[index]
            if gpu.capability < (8, 0):
                compute = "sm_" + "".join(map(str, gpu.capability))
                problems.append(
                    Problem(
                        f"mixed_precision is 'bf16', but GPU {index} ({gpu.name}, {compute}) "
                        "has no bf16",
                        _where(settings, "mixed_precision"),
                        "set `mixed_precision: fp16`, or pass --mixed-precision fp16",
                    )
                )
                break
    return problems


def _why_supervised(settings: Settings, supervise: bool) -> str | None:
    name = _setting_for_a_launcher(settings)
    if name is not None:
        return f"{name} is {settings.values[name].value}"
    return "--supervise" if supervise else None


def _setting_for_a_launcher(settings: Settings) -> str | None:
    for name in ("num_processes", "num_machines"):
        if settings.values[name].value > 1:
            return name
    for name, row in TABLE.items():
        if row.needs_launcher and settings.values[name].value != row.default:
            return name
    return None


def _environment(
    settings: Settings,
    machine: Machine,
    gpus: tuple[int, ...],
    supervised: str | None,
    environ: Mapping[str, str],
) -> dict[str, Value]:
    device = settings.device
    changes = {
        "HEADWAY_RUN": Value(
            contract.encode(_contract(settings, supervised)), Origin("default", "the launcher")
        ),
        "ACCELERATE_USE_CPU": _from(settings, "device", str(device == "cpu").lower()),
        "ACCELERATE_MIXED_PRECISION": _from(settings, "mixed_precision"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _from(settings, "gradient_accumulation_steps"),
    }
    threads = threads_given_by(settings.env) or threads_given_by(environ)
    if threads is None or settings.origin("threads_per_process").layer != "detected":
        changes["OMP_NUM_THREADS"] = _from(settings, "threads_per_process")
    if device == "mps":
        given = environ.get("PYTORCH_ENABLE_MPS_FALLBACK")
        changes["PYTORCH_ENABLE_MPS_FALLBACK"] = _mps_fallback(given)
    if device == "cpu" and machine.visible_gpus:
        changes["CUDA_VISIBLE_DEVICES"] = _from(settings, "device", "")
    if gpus and gpus != tuple(range(len(machine.visible_gpus))):
        changes["CUDA_VISIBLE_DEVICES"] = _from(settings, "devices", _mask(gpus, machine))
    stale = Origin("default", "of another launch around this one")
    changes |= {name: Value(None, stale) for name in RANK_VARIABLES if name in environ}
    if supervised is not None and not environ.get("PYTHONUNBUFFERED"):
        changes["PYTHONUNBUFFERED"] = Value("1", Origin("default", "output passes through pipes"))
    if settings.num_processes * settings.num_machines > 1 and not environ.get(_FLIGHT_RECORDER):
        recorder = Origin("default", "each rank remembers its last collectives, should it hang")
        changes[_FLIGHT_RECORDER] = Value("2000", recorder)
    if supervised is not None and _is_local(settings):
        changes |= _loopback_interfaces(settings, machine, environ)
    if settings.debug_rank is not None and device == "cuda":
        # it would end ranks whose collectives wait for the debugged one
        changes["TORCH_NCCL_ENABLE_MONITORING"] = _from(settings, "debug_rank", "0")
    for name in settings.env:
        changes[name] = _from(settings, "env", settings.env[name])
    return changes


def _contract(settings: Settings, supervised: str | None) -> RunContract:
    told = ("device", "mixed_precision", "gradient_accumulation_steps")
    return RunContract(
        device=settings.device,
        mixed_precision=settings.mixed_precision,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        origins={name: settings.origin(name).words for name in told},
        flags=tuple(name for name in told if settings.origin(name).layer == "flag"),
        timeouts_suspended=supervised is not None and settings.debug_rank is not None,
    )


def _from(settings: Settings, name: str, value: str | None = None) -> Value:
    text = str(settings.values[name].value) if value is None else value
    return Value(text, settings.origin(name))


def _mps_fallback(given: str | None) -> Value:
    """torch reads this once, as a number, when its library loads; any other text would crash it."""
    if given is None:
        return Value("1", Origin("default", "operators that MPS lacks run on the CPU"))
    on = given.strip().lower() not in ("", "0", "false", "no", "off")
    return Value(str(int(on)), Origin("environment", f"PYTORCH_ENABLE_MPS_FALLBACK={given}"))


def _mask(gpus: tuple[int, ...], machine: Machine) -> str:
    """Map indices through an existing CUDA_VISIBLE_DEVICES, never around it."""
    if machine.cuda_visible_devices is None:
        return ",".join(map(str, gpus))
    tokens = [token.strip() for token in machine.cuda_visible_devices.split(",")]
    return ",".join(tokens[index] for index in gpus)


def _is_local(settings: Settings) -> bool:
    """True when all ranks are on this machine, several agents on it included."""
    address = settings.main_address or ""
    return settings.num_machines == 1 or address == "localhost" or address.startswith("127.")


def _loopback_interfaces(
    settings: Settings, machine: Machine, environ: Mapping[str, str]
) -> dict[str, Value]:
    interface = "lo0" if machine.system == "Darwin" else "lo"
    names = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if settings.device == "cuda" else [])]
    local = Value(interface, Origin("default", "all ranks are on this machine"))
    return {name: local for name in names if name not in environ}


def _notes(
    settings: Settings, program: Program, supervised: str | None, in_process: bool
) -> list[str]:
    """Return a named warning for what was set for this very launch and has no effect in it."""
    notes = []
    if settings.num_machines == 1:
        notes += _without_effect(settings, ("main_address", "main_port"), "on one machine")
    if settings.debug_rank is not None and supervised is not None:
        notes += _without_effect(settings, ("ranks", "hang_timeout"), "beside debug_rank")
        if settings.log_dir is not None:
            notes.append(f"rank {settings.debug_rank} writes to the terminal, and into no log file")
        if program.kind == "program":
            notes.append(f"debug_rank suspends no timeouts in {program.name}: it is no script")
    for name in settings.env:
        if in_process and name.startswith(("PYTHON", "LD_", "DYLD_")):
            notes.append(f"env sets {name}, which a process reads at its start: too late here")
    return notes


def _without_effect(settings: Settings, names: tuple[str, ...], when: str) -> list[str]:
    return [
        f"{name} has no effect {when} ({settings.origin(name)})"
        for name in names
        if settings.origin(name).layer in ("flag", "environment")
    ]
