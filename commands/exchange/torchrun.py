"""torchrun's command line, to and from settings of ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from headway.commands import flag_aliases
from headway.commands.exchange import ON_ONE_MACHINE, Imported
from headway.contract.run import RANK_VARIABLES
from headway.devices.table import KINDS, kind_of
from headway.errors import ConfigError, did_you_mean
from headway.launcher.plan.plan import LaunchPlan
from headway.machine.devices import ALL
from headway.machine.facts import Machine
from headway.settings.setting import Raw
from headway.settings.table import OF_MACHINES, TABLE, YES

_SAME = ("--max-restarts", "--log-dir")
_OTHERS = ("--node-rank", "--master-addr", "--master-port", "--shutdown-timeout")
RENAMED = {  # torchrun's flags, and the setting that each is
    **{row.flag: row.name for row in TABLE.values() if row.flag in _SAME},
    **{flag: flag_aliases.RENAMED[flag] for flag in _OTHERS},
}
VARIABLES = {  # environment variables, and the setting that each is
    "OMP_NUM_THREADS": "threads_per_process",
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
}
_ALWAYS_DECIDED = (*(name for name in RENAMED.values() if name not in OF_MACHINES), "ranks")
"""Settings that a torchrun command line decides even where it leaves their flags out."""

_MEETING = ("--master-addr", "--master-port")
_WITHOUT_SETTING = ("--standalone", "--module", "--no-python", "--use-env")
_DEPRECATED = "torch.distributed.launch"
_MODULES = ("torch.distributed.run", _DEPRECATED)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_GIVEN = object()
WHERE = "the torchrun command line"


def is_torchrun(words: Sequence[str]) -> bool:
    """Return whether these words are a command line that runs torchrun."""
    return _start(words) is not None


def _start(words: Sequence[str]) -> tuple[int, int] | None:
    """Return where torchrun stands, and the first word after its name."""
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name == "torchrun":
            return index, index + 1
        if name.startswith("python") and "-m" in words[index:]:
            end = words.index("-m", index) + 2
            if words[end - 1 : end] and words[end - 1] in _MODULES:
                return index, end
    return None


def from_torchrun(words: Sequence[str], machine: Machine) -> Imported:
    """Return the settings that a torchrun command line stands for.

    `words` begin with the variables that are set before torchrun; `machine` is this one, for
    `--nproc-per-node cpu` and `auto`.
    """
    start = _start(words)
    assert start is not None
    at, own = start
    front = at
    while front and _variable(words[front - 1]):
        front -= 1
    is_deprecated = words[own - 1] == _DEPRECATED
    variables = dict(word.partition("=")[::2] for word in words[front:at])
    flags, program, variables = _parsed(words[own:], variables, is_deprecated)
    line = _Line(flags)
    not_imported = []
    if front:
        prefix = shlex.join(words[:front])
        not_imported.append(f"{prefix} (put it in front of `headway launch`)")
    if own > at + 1 and (of_python := [one for one in words[at + 1 : own - 2] if one != "-u"]):
        not_imported.append(f"python {shlex.join(of_python)}")
    not_imported += line.take_variables(variables)
    not_imported += line.take_flags(machine)
    if is_deprecated and "--use-env" not in flags:
        not_imported.append("--local-rank for the script (read LOCAL_RANK in the environment)")
    values = line.values
    is_one = values["num_processes"] == "1" and values.get("num_machines", "1") == "1"
    launch = (
        # one process finds RANK only by this flag: a 1 in a profile does not set it
        *((TABLE["num_processes"].flag, "1") if is_one else ()),
        *(flag for flag in flags if flag in ("--no-python", "--module")),
        *program,
    )
    return Imported(values, not_imported, line.reset(), line.names, launch)


def _variable(word: str) -> str:
    """Return the name of the variable that a word sets; empty for other words."""
    name, equals, _ = word.partition("=")
    return name if equals and _NAME.fullmatch(name) else ""


def _parsed(
    words: Sequence[str], variables: Mapping[str, str], is_deprecated: bool
) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Return the flags that are given, the program with its words, and the other variables.

    torch's own parser reads them; variables named PET_... are flags, too.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    if is_deprecated:
        parser.add_argument("--use-env", "--use_env", action="store_true")
    usual = vars(parser.parse_args(["script"]))
    del usual["training_script"], usual["training_script_args"]

    def refuse(message: str) -> NoReturn:
        typed = message.rpartition(" ")[2].partition("=")[0]
        known = [f"--{name}".replace("_", "-") for name in usual]
        close = did_you_mean(typed, known) if "unrecognized" in message else None
        raise ConfigError(
            f"torchrun: {message}" + (f"; did you mean {close}?" if close else ""),
            where=WHERE,
            fix="give the command line as it was run: torchrun --nproc-per-node 2 train.py",
        )

    parser.error = refuse  # type: ignore[method-assign]
    parser.set_defaults(**dict.fromkeys(usual, _NOT_GIVEN))
    own, others = [], {}
    for name, text in variables.items():
        flag = name.removeprefix("PET_").lower()
        if not name.startswith("PET_") or flag not in usual:
            others[name] = text
        elif type(usual[flag]) is not bool:
            own.append(f"--{flag}={text}")
        elif text != "0":
            own.append(f"--{flag}")
    given = vars(parser.parse_args([*own, *words]))
    program = [given.pop("training_script"), *given.pop("training_script_args")]
    flags = {}
    for name, value in given.items():
        if value is not _NOT_GIVEN:
            text = ",".join(value) if isinstance(value, list) else str(value)
            flags[f"--{name}".replace("_", "-")] = "" if value is True else text
    return flags, program, others


class _Line:
    """What the flags and variables of a command line set here."""

    def __init__(self, flags: Mapping[str, str]) -> None:
        self.flags = flags
        self.values: dict[str, Raw] = {"num_processes": "1"}
        self.names: dict[str, str] = {}  # what torchrun calls each setting
        self.nodes = flags.get("--nnodes", "1")
        self.is_several = self.nodes not in ("1", "1:1")
        self.is_fixed = len(set(self.nodes.split(":"))) == 1
        self.backend = flags.get("--rdzv-backend", "static")
        # the endpoint is on machine 0, and not a server such as etcd
        self.meets_at_0 = self.backend in ("static", "c10d")
        # machines get their ranks when they meet
        self.is_numbered = self.is_several and self.backend != "static"
        self.is_numbered &= "--node-rank" not in flags

    def _set(self, name: str, values: Mapping[str, Raw]) -> None:
        self.values |= values
        self.names |= {key: name for key in values if not key.startswith("env.")}

    def take_variables(self, variables: Mapping[str, str]) -> list[str]:
        """Take variables over; return a line for each that has no counterpart."""
        left = []
        for name, text in variables.items():
            kind = next((kind for kind in KINDS.values() if kind.mask == name), None)
            if name in VARIABLES:
                first = text.split(",")[0].strip()  # "4,2" is 4 threads, and 2 in a nested region
                self._set(name, {VARIABLES[name]: first if name == "OMP_NUM_THREADS" else text})
            elif name == "ACCELERATE_USE_CPU":
                is_on = text.lower() in ("1", "true", "yes")
                self._set(name, {"device": "cpu"} if is_on else {})
            elif kind is not None and text.strip() in ("", "-1"):
                self._set(name, {"device": "cpu"})
            elif kind is not None:
                self._set(name, {"device": kind.name, "devices": text.split(",")})
            elif name == "PYTORCH_ENABLE_MPS_FALLBACK":
                self._set(name, {"mps_fallback": "strict" if text in ("", "0") else "on"})
            elif name in RANK_VARIABLES:
                left.append(f"{name}={text} (the launcher sets it in each process)")
            else:
                self._set(name, {f"env.{name}": text})
        return left

    def take_flags(self, machine: Machine) -> list[str]:
        """Take the flags over; return a line for each that has no counterpart."""
        left, why = dict(self.flags), self._why_not()
        for flag in _WITHOUT_SETTING:
            left.pop(flag, None)
        taken: dict[str, dict[str, Raw]] = {
            flag: {name: left[flag]} for flag, name in RENAMED.items() if flag in left
        }
        if "--nproc-per-node" in left:
            taken["--nproc-per-node"] = _processes(left["--nproc-per-node"], machine)
        if self.is_several:
            nodes = self.nodes.split(":")[0] if self.is_fixed else self.nodes
            taken["--nnodes"] = {"num_machines": nodes}
        else:
            taken["--nnodes"] = {}
            if left.get("--node-rank") == "0":
                taken["--node-rank"] = {}
            if "--local-ranks-filter" in left:
                taken["--local-ranks-filter"] = {"ranks": left["--local-ranks-filter"]}
        if "--rdzv-endpoint" in left:
            taken["--rdzv-endpoint"] = self._endpoint(left["--rdzv-endpoint"])
        if self.is_numbered and self.meets_at_0:
            taken["--rdzv-backend"] = {}
        if "--log-dir" in left and left.get("--tee") == "3":
            taken["--tee"] = {}
        for flag, values in taken.items():
            if flag in left and flag not in why:
                del left[flag]
                self._set(flag, values)
        return [
            f"{flag} {text}".rstrip() + (f" ({why[flag]})" if flag in why else "")
            for flag, text in left.items()
        ]

    def _why_not(self) -> dict[str, str]:
        """Return why flags are not taken over here."""
        why = {}
        if "--log-dir" in self.flags:
            why["--redirects"] = "output goes to log_dir and to the console"
        if not self.is_several:
            why |= {flag: ON_ONE_MACHINE[RENAMED[flag]] for flag in _MEETING}
            why["--rdzv-endpoint"] = ON_ONE_MACHINE["main_address"]
            return why
        has_endpoint = "--rdzv-endpoint" in self.flags
        if not self.meets_at_0:
            why["--rdzv-endpoint"] = f"it is a server of {self.backend}, and machine 0 is not known"
        elif has_endpoint:
            why |= dict.fromkeys(_MEETING, "--rdzv-endpoint is used")
        if self.is_numbered and self.meets_at_0 and self.is_fixed:
            why["--rdzv-backend"] = "set machine_rank on each machine, or pass --machine-rank"
        names_machine_0 = (has_endpoint and self.meets_at_0) or "--master-addr" in self.flags
        if not self.is_fixed and not names_machine_0:
            why["--nnodes"] = "without --rdzv-endpoint, machine 0 is not known"
        return why

    def _endpoint(self, text: str) -> dict[str, Raw]:
        """Return the address of machine 0: HOST, HOST:PORT or [IPv6]:PORT."""
        found = re.fullmatch(r"\[?(.*?)\]?(?::([^:\]]*))?", text, re.DOTALL)
        assert found is not None
        port = found[2] or ("29400" if self.backend == "c10d" else "")  # torch's, for c10d alone
        return {"main_address": found[1], **({"main_port": port} if port else {})}

    def reset(self) -> tuple[str, ...]:
        """Return the settings to remove from the profile: torchrun has its defaults for them."""
        devices = ("devices",) if self.values.get("device") == "cpu" else ()
        usual = (*_ALWAYS_DECIDED, *devices)
        if self.is_several:
            keeps_rank = self.is_numbered and self.is_fixed
            return (*usual, *(() if keeps_rank else ("machine_rank",)), "main_port")
        return (*usual, *OF_MACHINES) if self.is_fixed else usual


def _processes(text: str, machine: Machine) -> dict[str, Raw]:
    if text == "auto" and machine.best_device()[0] == "cpu":  # auto is one process on a CPU here
        text = "cpu"
    if text == "cpu":
        return {"device": "cpu", "num_processes": str(machine.cores)}
    device = machine.gpu_kind if text == "gpu" else text
    if kind_of(device).is_numbered:
        return {"device": device, "num_processes": "auto"}
    return {"num_processes": text}


def to_torchrun(plan: LaunchPlan, program: Sequence[str]) -> str:
    """Return the torchrun command line that runs `program` as `plan` does."""
    settings = plan.settings
    variables = [
        f"{name}={shlex.quote(f'{plan.environment[name].value}')}" for name in _variables_set(plan)
    ]
    words = ["torchrun"]
    if settings.num_machines == 1:
        words.append("--standalone")
    elif settings.num_machines.is_range:  # torchrun's static rendezvous has no ranges
        place = f"{settings.main_address}:{settings.main_port}"
        words += ["--nnodes", f"{settings.num_machines}"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place]
    else:
        words += ["--nnodes", f"{settings.num_machines}", "--node-rank", f"{settings.machine_rank}"]
        words += ["--master-addr", f"{settings.main_address}"]
        words += ["--master-port", f"{settings.main_port}"]
    words += ["--nproc-per-node", f"{settings.num_processes}"]
    words += ["--shutdown-timeout", f"{settings.grace_period_s}"]
    if settings.max_restarts:
        words += ["--max-restarts", f"{settings.max_restarts}"]
    if settings.log_dir:
        words += ["--log-dir", settings.log_dir, "--tee", "3"]
    if settings.ranks is not None and settings.num_machines == 1:
        words += ["--local-ranks-filter", ",".join(map(str, settings.ranks))]
    return " ".join([*variables, shlex.join([*words, *program])])


_WITHOUT_FLAG = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_ENABLE_MPS_FALLBACK"),
    *(*VARIABLES, "ACCELERATE_USE_CPU"),
)
"""Variables for which torchrun has no flag; torch, Headway and Accelerate read them."""


def _variables_set(plan: LaunchPlan) -> list[str]:
    names = dict.fromkeys((*_WITHOUT_FLAG, *plan.settings.env))
    return [name for name in names if name in plan.environment and _NAME.fullmatch(name)]


_EXPRESSED = (
    *("num_processes", "num_machines", "max_restarts", "log_dir", "grace_period_s"),
    *("mixed_precision", "gradient_accumulation_steps", "threads_per_process"),
)
"""Settings that a flag or a variable of the command line always carries over."""


def not_in_torchrun(plan: LaunchPlan, names: Sequence[str]) -> Iterator[str]:
    """Yield those of the settings `names` that a torchrun command line cannot express."""
    settings, variables = plan.settings, _variables_set(plan)
    masked = "CUDA_VISIBLE_DEVICES" in variables
    held = {  # a setting that is not named here is reported
        **dict.fromkeys(_EXPRESSED, True),
        "device": settings.device == "cpu" or masked,
        "devices": settings.devices == ALL or masked,
        "mps_fallback": "PYTORCH_ENABLE_MPS_FALLBACK" in variables,
        "ranks": plan.is_one_machine,  # torchrun's filter is by local rank
        "leave_children": settings.leave_children == YES,  # as torchrun does
        **dict.fromkeys(("start_method", "hang_timeout", "debug_rank"), False),
        **dict.fromkeys(("machine_rank", "main_address", "main_port"), not plan.is_one_machine),
    }
    for name in names:
        if name == "env":
            yield from (f"env.{key}" for key in settings.env if key not in variables)
        elif not held.get(name, False):
            yield name
