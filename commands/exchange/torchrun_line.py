"""torchrun's command line: what it says in our settings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from headway.commands.exchange.imported import OF_SEVERAL, ON_ONE_MACHINE, Imported
from headway.commands.exchange.shell_lines import Word
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

_WITHOUT_MEANING = ("exec", "env", "time", "if", "then", "else", "do", "{", "!")  # in front, too
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SEVERAL_WORDS = re.compile(r"""\$(\w+|\{.*\}|\(.*\)|@)|`.*`|"\$(@|\{\w+\[@\]\})\"""", re.DOTALL)
"""A word that a shell may replace by several."""


def is_torchrun(words: Sequence[Word]) -> bool:
    """True for the words of a command line that runs torchrun."""
    return _start(words) is not None


class _Start(NamedTuple):
    """Where torchrun stands in a command line."""

    program: int
    own: int  # the first word behind its name


def _start(words: Sequence[Word]) -> _Start | None:
    has_front = may_be_value = has_around = is_around = False
    for index, word in enumerate(words):
        own = _behind_name(words, index)
        if own and is_around == has_around:
            return _Start(index, own)
        is_flag = word.text.startswith("-")
        is_around = is_around or (has_around and word.text in ("run", "exec"))
        has_around = has_around or word.text in _AROUND
        if word.text in (*_IN_FRONT, *_WITH_A_WORD, *_WITHOUT_MEANING):
            has_front = True
        elif not (variable(word) or has_around or (has_front and (is_flag or may_be_value))):
            return None
        may_be_value = (is_flag and "=" not in word.text) or word.text in _WITH_A_WORD
    return None


def _behind_name(words: Sequence[Word], index: int) -> int:
    """Return the index behind torchrun's name if it stands at `index`; else 0."""
    name = words[index].text.rpartition("/")[2]
    if name == "torchrun":
        return index + 1
    end = index + 1
    while end < len(words) and words[end].text.startswith("-") and words[end].text != "-m":
        end += 2 if words[end].text in ("-X", "-W") else 1
    is_python = name.startswith("python") or not words[index].is_plain
    module = [word.text for word in words[end : end + 2]]
    return end + 2 if is_python and module in [["-m", name] for name in _MODULES] else 0


def variable(word: Word) -> str:
    """Return the name of the variable that a word sets; empty for other words."""
    name, equals, _ = word.text.partition("=")
    return name if equals and NAME.fullmatch(name) else ""


def from_torchrun(words: Sequence[Word], machine: Machine, where: str) -> Imported:
    """Return what a torchrun command line means here.

    Args:
        words: the command line, with the variables that are set before the program.
        machine: this one, for `--nproc-per-node cpu` and `auto`.
        where: it was found, for messages.

    Raises:
        ConfigError: a flag is none of torchrun's, lacks its value, or has a shell's variable in it.
    """
    start = _start(words)
    assert start is not None
    front = words[: start.program]
    is_old = words[start.own - 1].text == _OLD
    flags, program = _split(words[start.own :], is_old, where)
    flags = [*_flags_in(front), *flags]
    front = [word for word in front if not _flag_of(word)]
    said = {flag: word.text for flag, word in flags}
    values: dict[str, Raw] = {"num_processes": "1"}
    names: dict[str, str] = {}
    left = _left_in_front(front, words[start.program + 1 : max(start.own - 2, 0)])
    meanings = [
        *(
            (word.text, variable(word), _of_variable(*word.text.split("=", 1)))
            for word in front
            if variable(word)
        ),
        *(
            (f"{flag} {text}".rstrip(), flag, _of_flag(flag, said, machine))
            for flag, text in said.items()
        ),
    ]
    has_meaning = {name for _, name, meaning in meanings if not isinstance(meaning, str)}
    taken_over = [(flag, word) for flag, word in flags if flag in has_meaning]
    _refuse_replaced(filter(variable, front), taken_over, program, where)
    for text, name, meaning in meanings:
        if isinstance(meaning, str):
            left.append(text + (f" ({meaning})" if meaning else ""))
        else:
            values |= meaning
            names |= {key: name for key in meaning if not key.startswith("env.")}
    if is_old and "--use-env" not in said:
        left.append("--local-rank for the script (here it is LOCAL_RANK in its environment)")
    options = [flag for flag in said if flag in ("--no-python", "--module")]
    launch = (*options, *(word.raw for word in program)) if program else ()
    return Imported(values, left, _left_at_default(values, said), names, launch)


def _flag_of(word: Word) -> str:
    """Return the flag of torchrun that a PET_ variable stands for; empty for other words."""
    name = variable(word)
    flag = "--" + name.removeprefix("PET_").lower().replace("_", "-")
    return flag if name.startswith("PET_") and flag in (*VALUED, *LONE) else ""


def _flags_in(front: Sequence[Word]) -> list[tuple[str, Word]]:
    """Return the flags that variables say; those on the command line come later and beat them."""
    found = []
    for word in front:
        flag, text = _flag_of(word), word.text.partition("=")[2]
        if flag in VALUED:
            found.append((flag, word._replace(text=text)))
        elif flag and text != "0":
            found.append((flag, word._replace(text="")))
    return found


def _left_in_front(front: Sequence[Word], of_python: Sequence[Word]) -> list[str]:
    is_around = any(word.text in _AROUND for word in front)  # then "env" may be a name
    words = [word for word in front if is_around or not variable(word)]  # -e NAME=VALUE
    others = [w.raw for w in words if is_around or w.text not in _WITHOUT_MEANING]
    flags = [word.raw for word in of_python if word.text != "-u"]  # rank's lines come at once here
    left = [f"{' '.join(others)} (put it in front of `headway launch`)"] if others else []
    return [*left, *([f"python {' '.join(flags)}"] if flags else [])]


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


def _refuse_replaced(
    variables: Iterator[Word],
    flags: Sequence[tuple[str, Word]],
    program: Sequence[Word],
    where: str,
) -> None:
    """Refuse what only a running shell could tell: of the script's own words, it need not."""
    texts = [word.text for word in variables if not word.is_plain]
    texts += [f"{flag}={word.text}" for flag, word in flags if not word.is_plain]
    texts += [word.raw for word in program[:1] if _SEVERAL_WORDS.fullmatch(word.raw)]
    if texts:
        raise ConfigError(
            f"{texts[0]} is what a shell would replace, and its value is not known here",
            where=where,
            fix="write the value out, or give the command line without quotes around it all",
        )


def _split(
    words: Sequence[Word], is_old: bool, where: str
) -> tuple[list[tuple[str, Word]], Sequence[Word]]:
    """Return torchrun's flags with their values, and the program that it runs with its words."""
    flags = []
    rest = list(words)
    while rest and rest[0].text.startswith("-") and rest[0].text != "--":
        word = rest.pop(0)
        name, equals, text = word.text.partition("=")
        if not name.startswith("--"):  # -t3, -t 3
            name, text = word.text[:2], word.text[2:].removeprefix("=")
            equals = text
        name = _full_name(name, is_old, where)
        value = word._replace(text=text)
        if name in VALUED and not equals:
            if not rest:
                raise ConfigError(
                    f"{name} needs a value, and the command line ends there",
                    where=where,
                    fix="give the command line as it was run",
                )
            value = rest.pop(0)
        flags.append((name, value))
    return flags, rest[1:] if rest and rest[0].text == "--" else rest


def _full_name(name: str, is_old: bool, where: str) -> str:
    """Return a flag as torchrun's help spells it; torchrun takes underscores and beginnings."""
    if name.startswith("--"):
        name = "--" + name[2:].replace("_", "-")
    name = _SHORT.get(name, name)
    known: tuple[str, ...] = (*VALUED, *LONE, *(_LONE_IN_OLD if is_old else ()))
    matches = [flag for flag in known if flag == name] or [f for f in known if f.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    close = did_you_mean(name, known)
    raise ConfigError(
        f"{name} is no flag of torchrun" + (f"; did you mean {close}?" if close else ""),
        where=where,
        fix="give the command line as it was run",
    )
