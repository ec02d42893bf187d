"""Read a torchrun command line as settings of ours. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headway.commands import flag_aliases
from headway.commands.exchange.imported import MULTI_MACHINE, ON_ONE_MACHINE, Imported
from headway.contract.run import RANK_VARIABLES
from headway.devices.table import KINDS, kind_of
from headway.errors import ConfigError, did_you_mean
from headway.machine.facts import Machine
from headway.settings.setting import Raw
from headway.settings.table import TABLE

_SAME = ("--max-restarts", "--log-dir")
_OTHERS = ("--node-rank", "--master-addr", "--master-port", "--shutdown-timeout")
RENAMED = {  # torchrun's flags, and the setting that each is
    **{row.flag: row.name for row in TABLE.values() if row.flag in _SAME},
    **{flag: flag_aliases.RENAMED[flag] for flag in _OTHERS},
}
_ALWAYS_DECIDED = (*(name for name in RENAMED.values() if name not in MULTI_MACHINE), "ranks")
"""Settings that a torchrun command line decides even where it leaves their flags out."""

VALUED = (
    *("--nnodes", "--nproc-per-node", *RENAMED, "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
    *("--rdzv-conf", "--monitor-interval", "--start-method", "--event-log-handler", "--role"),
    *("--redirects", "--tee", "--local-ranks-filter", "--duplicate-stdout-filters"),
    *("--duplicate-stderr-filters", "--local-addr", "--logs-specs", "--numa-binding"),
    "--signals-to-handle",
)
SWITCHES = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
_SWITCHES_IN_DEPRECATED = ("--use-env",)  # torch.distributed.launch has it too
_WITHOUT_SETTING = ("--standalone", "--module", "--no-python", "--use-env")
_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
_DEPRECATED = "torch.distributed.launch"
_MODULES = ("torch.distributed.run", _DEPRECATED)
_PREFIXES = ("nohup", "srun", "sudo", "nice", "numactl", "setsid", "stdbuf")
_PREFIXES_WITH_WORD = ("uv", "poetry", "timeout")  # uv run, timeout 60
_ENVIRONMENTS = (
    *("conda", "mamba", "micromamba", "pixi"),
    *("docker", "podman", "apptainer", "singularity"),
)
"""Programs that run torchrun in a container or an environment of theirs, behind any words."""

_IGNORED_PREFIXES = ("exec", "env", "time")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WHERE = "the torchrun command line"


def is_torchrun(words: Sequence[str]) -> bool:
    """True for the words of a command line that runs torchrun."""
    return _start(words) is not None


class _Start(NamedTuple):
    """The position of torchrun in a command line."""

    program: int
    own: int  # of the first word after its name


def _start(words: Sequence[str]) -> _Start | None:
    has_front = may_be_value = has_environment = is_in_environment = False
    for index, word in enumerate(words):
        own = _after_name(words, index)
        if own and is_in_environment == has_environment:
            return _Start(index, own)
        is_flag = word.startswith("-")
        is_in_environment = is_in_environment or (has_environment and word in ("run", "exec"))
        has_environment = has_environment or word in _ENVIRONMENTS
        if word in (*_PREFIXES, *_PREFIXES_WITH_WORD, *_IGNORED_PREFIXES):
            has_front = True
        elif not (_variable(word) or has_environment or (has_front and (is_flag or may_be_value))):
            return None
        may_be_value = (is_flag and "=" not in word) or word in _PREFIXES_WITH_WORD
    return None


def _after_name(words: Sequence[str], index: int) -> int:
    """Return the index after torchrun's name if it is at `index`; else 0."""
    name = words[index].rpartition("/")[2]
    if name == "torchrun":
        return index + 1
    end = index + 1
    while end < len(words) and words[end].startswith("-") and words[end] != "-m":
        end += 2 if words[end] in ("-X", "-W") else 1
    is_module = [*words[end : end + 2]] in [["-m", module] for module in _MODULES]
    return end + 2 if name.startswith("python") and is_module else 0


def _variable(word: str) -> str:
    """Return the name of the variable that a word sets; empty for other words."""
    name, equals, _ = word.partition("=")
    return name if equals and NAME.fullmatch(name) else ""


def from_torchrun(words: Sequence[str], machine: Machine) -> Imported:
    """Return the settings that a torchrun command line stands for.

    Args:
        words: the command line, with the variables that are set before torchrun.
        machine: this one, for `--nproc-per-node cpu` and `auto`.

    Raises:
        ConfigError: nothing follows torchrun, or a flag is unknown to it, or lacks its value.
    """
    start = _start(words)
    assert start is not None
    if not words[start.own :]:
        raise ConfigError(
            f"nothing follows {words[start.own - 1]!r}",
            where=WHERE,
            fix="pass the whole command: `headway config import torchrun --standalone train.py`",
        )
    front = words[: start.program]
    is_deprecated = words[start.own - 1] == _DEPRECATED
    flags, program = _split(words[start.own :], is_deprecated)
    flags = {**_flags_in(front), **flags}
    front = [word for word in front if not _flag_of(word)]
    values: dict[str, Raw] = {"num_processes": "1"}
    names: dict[str, str] = {}
    not_imported = _unknown_prefixes(front, words[start.program + 1 : max(start.own - 2, 0)])
    meanings = [
        *(
            (word, _variable(word), _of_variable(*word.split("=", 1)))
            for word in front
            if _variable(word)
        ),
        *(
            (f"{flag} {text}".rstrip(), flag, _of_flag(flag, flags, machine))
            for flag, text in flags.items()
        ),
    ]
    for text, name, meaning in meanings:
        if isinstance(meaning, str):
            not_imported.append(text + (f" ({meaning})" if meaning else ""))
        else:
            values |= meaning
            names |= {key: name for key in meaning if not key.startswith("env.")}
    if is_deprecated and "--use-env" not in flags:
        not_imported.append("--local-rank for the script (read LOCAL_RANK in the environment)")
    options = [flag for flag in flags if flag in ("--no-python", "--module")]
    launch = (*_flag_for_one(values), *options, *program) if program else ()
    return Imported(values, not_imported, _reset(values, flags), names, launch)


def _flag_for_one(values: Mapping[str, Raw]) -> tuple[str, ...]:
    """Return the flag with which one process finds RANK: a 1 in a profile does not set it."""
    is_one = values["num_processes"] == "1" and values.get("num_machines", "1") == "1"
    return (TABLE["num_processes"].flag, "1") if is_one else ()


def _flag_of(word: str) -> str:
    """Return the flag of torchrun that a PET_ variable stands for; empty for other words."""
    name = _variable(word)
    flag = "--" + name.removeprefix("PET_").lower().replace("_", "-")
    return flag if name.startswith("PET_") and flag in (*VALUED, *SWITCHES) else ""


def _flags_in(front: Sequence[str]) -> dict[str, str]:
    """Return the flags that variables set; those on the command line overrule them."""
    found = {}
    for word in front:
        flag, text = _flag_of(word), word.partition("=")[2]
        if flag in VALUED:
            found[flag] = text
        elif flag and text != "0":
            found[flag] = ""
    return found


def _unknown_prefixes(front: Sequence[str], of_python: Sequence[str]) -> list[str]:
    has_environment = any(word in _ENVIRONMENTS for word in front)  # then "env" may be its name
    words = [word for word in front if has_environment or not _variable(word)]  # -e NAME=VALUE
    others = [word for word in words if has_environment or word not in _IGNORED_PREFIXES]
    flags = [word for word in of_python if word != "-u"]  # ranks are unbuffered here
    left = [f"{shlex.join(others)} (put it in front of `headway launch`)"] if others else []
    return [*left, *([f"python {shlex.join(flags)}"] if flags else [])]


def _reset(values: Mapping[str, Raw], flags: Mapping[str, str]) -> tuple[str, ...]:
    """Return the settings to remove from the profile: torchrun has its defaults for them."""
    devices = ("devices",) if values.get("device") == "cpu" else ()
    usual = (*_ALWAYS_DECIDED, *devices)
    if _is_several(flags):
        keeps_rank = _numbers_machines(flags) and _is_fixed(flags)
        numbered = () if keeps_rank else ("machine_rank",)
        return (*usual, *numbered, "main_port")
    return (*usual, *MULTI_MACHINE) if _is_fixed(flags) else usual


VARIABLES = {  # environment variables, and the setting that each is
    "OMP_NUM_THREADS": "threads_per_process",
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
}


def _of_variable(name: str, text: str) -> dict[str, Raw] | str:
    """Return the settings of a variable, or why it has no counterpart."""
    if name in VARIABLES:
        first = text.split(",")[0].strip()  # "4,2" is 4 threads, and 2 in a nested region
        return {VARIABLES[name]: first if name == "OMP_NUM_THREADS" else text}
    if name == "ACCELERATE_USE_CPU":
        return {"device": "cpu"} if text.lower() in ("1", "true", "yes") else {}
    for kind in KINDS.values():
        if name == kind.mask:
            hides = text.strip() in ("", "-1")
            return {"device": "cpu"} if hides else {"device": kind.name, "devices": text.split(",")}
    if name == "PYTORCH_ENABLE_MPS_FALLBACK":
        return {"mps_fallback": "strict" if text in ("", "0") else "on"}
    if name in RANK_VARIABLES:
        return "the launcher sets it in each process"
    return {f"env.{name}": text}


def _of_flag(flag: str, flags: Mapping[str, str], machine: Machine) -> dict[str, Raw] | str:
    """Return the settings of a flag, or why it has no counterpart."""
    text, is_several = flags[flag], _is_several(flags)
    if flag in _WITHOUT_SETTING or (flag == "--node-rank" and text == "0" and not is_several):
        return {}
    if flag in RENAMED:
        name = RENAMED[flag]
        if name in ON_ONE_MACHINE and not is_several:
            return ON_ONE_MACHINE[name]
        if name in ON_ONE_MACHINE and "--rdzv-endpoint" in flags and _is_of_machine_0(flags):
            return "--rdzv-endpoint is used"
        return {name: text}
    if flag == "--rdzv-endpoint" and is_several and not _is_of_machine_0(flags):
        return f"it is a server of {flags['--rdzv-backend']}, and machine 0 is not known"
    if flag == "--rdzv-endpoint":
        return _endpoint(text, flags) if is_several else ON_ONE_MACHINE["main_address"]
    if flag == "--rdzv-backend" and _numbers_machines(flags) and _is_of_machine_0(flags):
        if not _is_fixed(flags):
            return {}  # machines get their ranks when they meet, here too
        return "set machine_rank on each machine, or pass --machine-rank"
    if flag == "--nproc-per-node":
        return _processes(text, machine)
    if flag == "--local-ranks-filter" and not is_several:
        return {"ranks": text}
    if flag == "--nnodes":
        return _machines(text, flags) if is_several else {}
    if flag == "--tee" and text == "3" and "--log-dir" in flags:
        return {}
    if flag == "--redirects" and "--log-dir" in flags:
        return "output goes to log_dir and to the console"
    return ""


def _machines(text: str, flags: Mapping[str, str]) -> dict[str, Raw] | str:
    if _is_fixed(flags):
        return {"num_machines": text.split(":")[0]}
    names_machine_0 = "--rdzv-endpoint" in flags and _is_of_machine_0(flags)
    if names_machine_0 or "--master-addr" in flags:
        return {"num_machines": text}
    return "without --rdzv-endpoint, machine 0 is not known"


def _processes(text: str, machine: Machine) -> dict[str, Raw]:
    if text == "auto" and machine.best_device()[0] == "cpu":  # auto is one process on a CPU here
        text = "cpu"
    if text == "cpu":
        return {"device": "cpu", "num_processes": str(machine.cores)}
    device = machine.gpu_kind if text == "gpu" else text
    if kind_of(device).is_numbered:
        return {"device": device, "num_processes": "auto"}
    return {"num_processes": text}


def _is_several(flags: Mapping[str, str]) -> bool:
    return flags.get("--nnodes", "1") not in ("1", "1:1")


def _is_fixed(flags: Mapping[str, str]) -> bool:
    """False where the number of machines may change."""
    return len(set(flags.get("--nnodes", "1").split(":"))) == 1


def _numbers_machines(flags: Mapping[str, str]) -> bool:
    """True where torchrun's rendezvous assigns the machine ranks."""
    is_static = flags.get("--rdzv-backend", "static") == "static"
    return _is_several(flags) and not is_static and "--node-rank" not in flags


def _is_of_machine_0(flags: Mapping[str, str]) -> bool:
    """Return whether the endpoint is on machine 0, and not that of a server such as etcd."""
    return flags.get("--rdzv-backend", "static") in ("static", "c10d")


def _endpoint(text: str, flags: Mapping[str, str]) -> dict[str, Raw]:
    """Return the address of machine 0: HOST, HOST:PORT or [IPv6]:PORT."""
    found = re.fullmatch(r"\[?(.*?)\]?(?::([^:\]]*))?", text, re.DOTALL)
    assert found is not None
    default = "29400" if flags.get("--rdzv-backend") == "c10d" else ""  # torch's, for c10d alone
    port = found[2] or default
    return {"main_address": found[1], **({"main_port": port} if port else {})}


def _split(words: Sequence[str], is_deprecated: bool) -> tuple[dict[str, str], Sequence[str]]:
    """Return torchrun's flags with their values, and the program that it runs with its words."""
    flags = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--"):  # -t3, -t 3
            name, text = word[:2], word[2:].removeprefix("=")
            equals = text
        name = _full_name(name, is_deprecated)
        if name in VALUED and not equals:
            if not rest:
                raise ConfigError(
                    f"{name} requires a value",
                    where=WHERE,
                    fix="give the command line as it was run",
                )
            text = rest.pop(0)
        flags[name] = text
    return flags, rest[1:] if rest and rest[0] == "--" else rest


def _full_name(name: str, is_deprecated: bool) -> str:
    """Return a flag as torchrun's help spells it; torchrun takes underscores and prefixes."""
    if name.startswith("--"):
        name = "--" + name[2:].replace("_", "-")
    name = _SHORT.get(name, name)
    known: tuple[str, ...] = (
        *VALUED,
        *SWITCHES,
        *(_SWITCHES_IN_DEPRECATED if is_deprecated else ()),
    )
    matches = [flag for flag in known if flag == name] or [f for f in known if f.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    close = did_you_mean(name, known)
    raise ConfigError(
        f"unknown torchrun flag {name}" + (f"; did you mean {close}?" if close else ""),
        where=WHERE,
        fix="give the command line as it was run",
    )
