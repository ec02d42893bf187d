"""torchrun's command line: what it says in our settings. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headway.commands.exchange.imported import OF_SEVERAL, ON_ONE_MACHINE, Imported
from headway.contract.run import RANK_VARIABLES
from headway.errors import ConfigError, did_you_mean
from headway.machine.facts import Machine
from headway.settings.table import Raw

SAME = {  # flags that are a setting by another name
    "--node-rank": "machine_rank",
    "--master-addr": "main_address",
    "--master-port": "main_port",
    "--max-restarts": "max_restarts",
    "--log-dir": "log_dir",
    "--shutdown-timeout": "grace_period_s",
}
VALUED = (
    *("--nnodes", "--nproc-per-node", *SAME, "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
    *("--rdzv-conf", "--monitor-interval", "--start-method", "--event-log-handler", "--role"),
    *("--redirects", "--tee", "--local-ranks-filter", "--duplicate-stdout-filters"),
    *("--duplicate-stderr-filters", "--local-addr", "--logs-specs", "--numa-binding"),
    "--signals-to-handle",
)
LONE = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
_LONE_IN_OLD = ("--use-env",)  # torch.distributed.launch has it too
_SAID_OTHERWISE = ("--standalone", "--module", "--no-python", "--use-env")
_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
_OLD = "torch.distributed.launch"
_MODULES = ("torch.distributed.run", _OLD)
_IN_FRONT = ("nohup", "srun", "sudo", "nice", "numactl", "setsid", "stdbuf")
_WITH_A_WORD = ("uv", "poetry", "timeout")  # uv run, timeout 60
_AROUND = ("conda", "mamba", "micromamba", "pixi", "docker", "podman", "apptainer", "singularity")
"""Programs that run torchrun in surroundings of their own, behind any other words."""

_IGNORED_IN_FRONT = ("exec", "env", "time")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WHERE = "the torchrun command line"


def is_torchrun(words: Sequence[str]) -> bool:
    """True for the words of a command line that runs torchrun."""
    return _start(words) is not None


class _Start(NamedTuple):
    """Where torchrun stands in a command line."""

    program: int
    own: int  # the first word behind its name


def _start(words: Sequence[str]) -> _Start | None:
    has_front = may_be_value = has_around = is_around = False
    for index, word in enumerate(words):
        own = _behind_name(words, index)
        if own and is_around == has_around:
            return _Start(index, own)
        is_flag = word.startswith("-")
        is_around = is_around or (has_around and word in ("run", "exec"))
        has_around = has_around or word in _AROUND
        if word in (*_IN_FRONT, *_WITH_A_WORD, *_IGNORED_IN_FRONT):
            has_front = True
        elif not (_variable(word) or has_around or (has_front and (is_flag or may_be_value))):
            return None
        may_be_value = (is_flag and "=" not in word) or word in _WITH_A_WORD
    return None


def _behind_name(words: Sequence[str], index: int) -> int:
    """Return the index behind torchrun's name if it stands at `index`; else 0."""
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
    """Return what a torchrun command line means here.

    Args:
        words: the command line, with the variables that are set before the program.
        machine: this one, for `--nproc-per-node cpu` and `auto`.

    Raises:
        ConfigError: a flag is unknown to torchrun, or lacks its value.
    """
    start = _start(words)
    assert start is not None
    front = words[: start.program]
    is_old = words[start.own - 1] == _OLD
    flags, program = _split(words[start.own :], is_old)
    said = {**_flags_in(front), **flags}
    front = [word for word in front if not _flag_of(word)]
    values: dict[str, Raw] = {"num_processes": "1"}
    names: dict[str, str] = {}
    left = _left_in_front(front, words[start.program + 1 : max(start.own - 2, 0)])
    meanings = [
        *(
            (word, _variable(word), _of_variable(*word.split("=", 1)))
            for word in front
            if _variable(word)
        ),
        *(
            (f"{flag} {text}".rstrip(), flag, _of_flag(flag, said, machine))
            for flag, text in said.items()
        ),
    ]
    for text, name, meaning in meanings:
        if isinstance(meaning, str):
            left.append(text + (f" ({meaning})" if meaning else ""))
        else:
            values |= meaning
            names |= {key: name for key in meaning if not key.startswith("env.")}
    if is_old and "--use-env" not in said:
        left.append("--local-rank for the script (here it is LOCAL_RANK in its environment)")
    options = [flag for flag in said if flag in ("--no-python", "--module")]
    launch = (*options, *program) if program else ()
    return Imported(values, left, _left_at_default(values, said), names, launch)


def _flag_of(word: str) -> str:
    """Return the flag of torchrun that a PET_ variable stands for; empty for other words."""
    name = _variable(word)
    flag = "--" + name.removeprefix("PET_").lower().replace("_", "-")
    return flag if name.startswith("PET_") and flag in (*VALUED, *LONE) else ""


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


def _left_in_front(front: Sequence[str], of_python: Sequence[str]) -> list[str]:
    is_around = any(word in _AROUND for word in front)  # then "env" may be a name
    words = [word for word in front if is_around or not _variable(word)]  # -e NAME=VALUE
    others = [word for word in words if is_around or word not in _IGNORED_IN_FRONT]
    flags = [word for word in of_python if word != "-u"]  # a rank's output is never delayed here
    left = [f"{shlex.join(others)} (put it in front of `headway launch`)"] if others else []
    return [*left, *([f"python {shlex.join(flags)}"] if flags else [])]


def _left_at_default(values: Mapping[str, Raw], said: Mapping[str, str]) -> tuple[str, ...]:
    """Return the settings that older values must not change, as torchrun has its own."""
    cpu = ("devices",) if values.get("device") == "cpu" else ()
    if _is_several(said):
        numbered = () if _numbers_machines(said) else ("machine_rank",)
        return (*cpu, *numbered, "main_port")
    return (*cpu, *OF_SEVERAL) if _is_fixed(said) else cpu


VARIABLES = {  # variables that are a setting by another name
    "OMP_NUM_THREADS": "threads_per_process",
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
}


def _of_variable(name: str, text: str) -> dict[str, Raw] | str:
    """Return what a variable sets here, or why it has no counterpart."""
    if name in VARIABLES:
        first = text.split(",")[0].strip()  # "4,2" is 4 threads, and 2 in a nested region
        return {VARIABLES[name]: first if name == "OMP_NUM_THREADS" else text}
    if name == "ACCELERATE_USE_CPU":
        return {"device": "cpu"} if text.lower() in ("1", "true", "yes") else {}
    if name == "CUDA_VISIBLE_DEVICES":
        hides = text.strip() in ("", "-1")
        return {"device": "cpu"} if hides else {"device": "cuda", "devices": text.split(",")}
    if name == "PYTORCH_ENABLE_MPS_FALLBACK":
        return {"mps_fallback": "strict" if text in ("", "0") else "on"}
    if name in RANK_VARIABLES:
        return "the launcher sets it for each process"
    return {f"env.{name}": text}


def _of_flag(flag: str, said: Mapping[str, str], machine: Machine) -> dict[str, Raw] | str:
    """Return what a flag sets here, or why it has no counterpart."""
    text, is_several = said[flag], _is_several(said)
    if flag in _SAID_OTHERWISE or (flag == "--node-rank" and text == "0" and not is_several):
        return {}
    if flag in SAME:
        name = SAME[flag]
        if name in ON_ONE_MACHINE and not is_several:
            return ON_ONE_MACHINE[name]
        if name in ON_ONE_MACHINE and "--rdzv-endpoint" in said:
            return "--rdzv-endpoint says it"
        return {name: text}
    if flag == "--rdzv-endpoint":
        return _endpoint(text, said) if is_several else ON_ONE_MACHINE["main_address"]
    if flag == "--rdzv-backend" and _numbers_machines(said):
        return "which numbers the machines; here set machine_rank on each, or pass --machine-rank"
    if flag == "--nproc-per-node" and text != "xpu":
        return _processes(text, machine)
    if flag == "--local-ranks-filter" and not is_several:
        return {"ranks": text}
    if flag == "--nnodes" and _is_fixed(said):
        return {"num_machines": text.split(":")[0]} if is_several else {}
    if flag == "--tee" and text == "3" and "--log-dir" in said:
        return {}
    if flag == "--redirects" and "--log-dir" in said:
        return "log_dir keeps the output, and the console shows it too"
    return ""


def _processes(text: str, machine: Machine) -> dict[str, Raw]:
    if text == "auto" and machine.best_device()[0] == "cpu":  # ours would be one process
        text = "cpu"
    if text == "cpu":
        return {"device": "cpu", "num_processes": str(machine.cores)}
    return {"device": "cuda", "num_processes": "auto"} if text == "gpu" else {"num_processes": text}


def _is_several(said: Mapping[str, str]) -> bool:
    return said.get("--nnodes", "1") not in ("1", "1:1")


def _is_fixed(said: Mapping[str, str]) -> bool:
    """False where the number of machines may change."""
    return len(set(said.get("--nnodes", "1").split(":"))) == 1


def _numbers_machines(said: Mapping[str, str]) -> bool:
    """True where torchrun's rendezvous gives the machines their ranks."""
    is_static = said.get("--rdzv-backend", "static") == "static"
    return _is_several(said) and not is_static and "--node-rank" not in said


def _endpoint(text: str, said: Mapping[str, str]) -> dict[str, Raw]:
    """Return where machine 0 is: HOST, HOST:PORT or [IPv6]:PORT."""
    found = re.fullmatch(r"\[?(.*?)\]?(?::([^:\]]*))?", text, re.DOTALL)
    assert found is not None
    usual = "29400" if said.get("--rdzv-backend") == "c10d" else ""  # torch's, for c10d alone
    port = found[2] or usual
    return {"main_address": found[1], **({"main_port": port} if port else {})}


def _split(words: Sequence[str], is_old: bool) -> tuple[dict[str, str], Sequence[str]]:
    """Return torchrun's flags with their values, and the program that it runs with its words."""
    flags = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--"):  # -t3, -t 3
            name, text = word[:2], word[2:].removeprefix("=")
            equals = text
        name = _full_name(name, is_old)
        if name in VALUED and not equals:
            if not rest:
                raise ConfigError(
                    f"{name} needs a value, and the command line ends there",
                    where=WHERE,
                    fix="give the command line as it was run",
                )
            text = rest.pop(0)
        flags[name] = text
    return flags, rest[1:] if rest and rest[0] == "--" else rest


def _full_name(name: str, is_old: bool) -> str:
    """Return a flag as torchrun's help spells it; torchrun takes underscores and prefixes."""
    if name.startswith("--"):
        name = "--" + name[2:].replace("_", "-")
    name = _SHORT.get(name, name)
    known: tuple[str, ...] = (*VALUED, *LONE, *(_LONE_IN_OLD if is_old else ()))
    matches = [flag for flag in known if flag == name] or [f for f in known if f.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    close = did_you_mean(name, known)
    raise ConfigError(
        f"unknown torchrun flag {name}" + (f"; did you mean {close}?" if close else ""),
        where=WHERE,
        fix="give the command line as it was run",
    )
