"""torchrun's command line: what it says in our settings, and ours in its flags. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from headway.commands.accelerate_file import Imported
from headway.errors import ConfigError, did_you_mean
from headway.launcher.plan import LaunchPlan
from headway.settings import Raw

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
_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}


def is_torchrun(words: Sequence[str]) -> bool:
    """True for the words of a command line that runs torchrun."""
    return _program_end(words) > 0


def _program_end(words: Sequence[str]) -> int:
    """Return how many words stand before torchrun's own, variables included; 0 if it is not run."""
    start = next((i for i, word in enumerate(words) if "=" not in word and word != "env"), 0)
    program = [word.rpartition("/")[2] for word in words[start : start + 3]]
    if program[:1] == ["torchrun"]:
        return start + 1
    is_module = program[1:] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"])
    return start + 3 if is_module and program[0].startswith("python") else 0


def from_torchrun(words: Sequence[str], cores: int, where: str) -> Imported:
    """Return what a torchrun command line means here.

    Args:
        words: the command line, with the variables that are set before the program.
        cores: of this machine, for `--nproc-per-node cpu`.
        where: it was found, for messages.

    Raises:
        ConfigError: a flag is none of torchrun's, lacks its value, or has a shell's variable in it.
    """
    end = _program_end(words)
    flags, program = _split(words[end:], where)
    for word in (*words[: end - 1], *(f"{flag}={text}" for flag, text in flags)):
        if "$" in word or "`" in word:
            raise ConfigError(
                f"{word} is what a shell would replace, and its value is not known here",
                where=where,
                fix="write the value out, or give the command line without quotes around it all",
            )
    values: dict[str, Raw] = {"num_processes": "1"}
    left = []
    for word in words[: end - 1]:
        name, equals, text = word.partition("=")
        if equals:
            values |= _variable(name, text)
    for flag, text in flags:
        if flag in SAME:
            values[SAME[flag]] = text
        elif flag == "--nproc-per-node" and text != "xpu":
            values |= _processes(text, cores)
        elif flag == "--local-ranks-filter" and not _is_several(flags):
            values["ranks"] = text
        elif flag == "--nnodes" and len(set(text.split(":"))) == 1:
            values["num_machines"] = text.split(":")[0]
        elif flag == "--rdzv-endpoint" and _is_several(flags):
            address, _, port = text.partition(":")
            values |= {"main_address": address} | ({"main_port": port} if port else {})
        elif flag not in ("--standalone", "--module", "--no-python"):
            left.append(f"{flag} {text}".rstrip())
    options = [f for f, _ in flags if f in ("--no-python", "--module")]
    return Imported(values, left, (*options, *program) if program else ())


_VARIABLES = {  # variables that are a setting by another name
    "OMP_NUM_THREADS": "threads_per_process",
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
}


def _variable(name: str, text: str) -> dict[str, Raw]:
    if name in _VARIABLES:
        return {_VARIABLES[name]: text}
    if name == "ACCELERATE_USE_CPU":
        return {"device": "cpu"} if text.lower() in ("1", "true", "yes") else {}
    if name == "CUDA_VISIBLE_DEVICES":
        hides = text.strip() in ("", "-1")
        return {"device": "cpu"} if hides else {"device": "cuda", "devices": text.split(",")}
    if name == "PYTORCH_ENABLE_MPS_FALLBACK":
        return {"mps_fallback": "strict" if text in ("", "0") else "on"}
    return {f"env.{name}": text}


def _processes(text: str, cores: int) -> dict[str, Raw]:
    if text == "cpu":
        return {"device": "cpu", "num_processes": str(cores)}
    return {"device": "cuda", "num_processes": "auto"} if text == "gpu" else {"num_processes": text}


def _is_several(flags: Sequence[tuple[str, str]]) -> bool:
    return dict(flags).get("--nnodes", "1") not in ("1", "1:1")


def _split(words: Sequence[str], where: str) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Return torchrun's flags with their values, and the program that it runs with its words."""
    flags = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if not word.startswith("--"):  # -t3, -t 3
            name, text = word[:2], word[2:].removeprefix("=")
            equals = text
        name = _full_name(name, where)
        if name in VALUED and not equals:
            if not rest:
                raise ConfigError(
                    f"{name} needs a value, and the command line ends there",
                    where=where,
                    fix="give the command line as it was run",
                )
            text = rest.pop(0)
        flags.append((name, text))
    return flags, tuple(rest[1:] if rest[:1] == ["--"] else rest)


def _full_name(name: str, where: str) -> str:
    """Return a flag as torchrun's help spells it; torchrun takes underscores and beginnings."""
    name = _SHORT.get(name, "--" + name[2:].replace("_", "-"))
    known = (*VALUED, *LONE)
    matches = [flag for flag in known if flag == name] or [f for f in known if f.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    close = did_you_mean(name, known)
    raise ConfigError(
        f"{name} is no flag of torchrun" + (f"; did you mean {close}?" if close else ""),
        where=where,
        fix="give the command line as it was run",
    )


def to_torchrun(plan: LaunchPlan, program: Sequence[str]) -> str:
    """Return the command line by which torchrun runs `program` as `plan` does."""
    settings = plan.settings
    names = dict.fromkeys((*_READ_BY_SCRIPTS, *settings.env))
    words = [f"{name}={plan.environment[name].value}" for name in names if name in plan.environment]
    words.append("torchrun")
    if settings.num_machines == 1:
        words.append("--standalone")
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
    return shlex.join([*words, *program])


_READ_BY_SCRIPTS = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_ENABLE_MPS_FALLBACK"),
    *(*_VARIABLES, "ACCELERATE_USE_CPU"),
)
"""What torchrun has no flag for; torch, and scripts of Headway and Accelerate read it."""


def in_torchrun(plan: LaunchPlan, name: str) -> bool:
    """Return whether a torchrun command line can hold the setting `name`."""
    if name == "ranks":  # its ranks are those of one machine
        return plan.is_one_machine
    return name not in ("start_method", "hang_timeout", "debug_rank")
