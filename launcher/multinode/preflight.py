"""Compares the machines' versions, scripts and settings before ranks start; reads the run's key.

This module does no I/O, except that it reads the script. The key in the environment authenticates
the machines.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from headway._version import __version__
from headway.errors import Code, ConfigError
from headway.ipc.run_contract import KEY_VARIABLE
from headway.launcher.multinode.messages import MachineFacts
from headway.launcher.plan.plan import LaunchPlan

_ARGUMENTS = "arguments"
_MUST_AGREE = (
    *("device", "mixed_precision", "gradient_accumulation_steps", "strategy", "shard_size"),
    *("wrap", "activation_checkpointing", "cpu_offload", "replace_accelerate", "max_restarts"),
    "restart_anyway",
)
_SHOULD_AGREE = (
    *("machine_timeout_s", "hang_timeout", "grace_period_s", "resume", "time_limit"),
    "threads_per_process",
)


def facts_of(plan: LaunchPlan, torch_version: str) -> MachineFacts:
    """Return the facts that machines compare; possible secrets are hashed."""
    program = plan.program
    must = {"headway": __version__, "torch": torch_version.partition("+")[0]}
    with suppress(OSError):
        if program.kind == "module":  # Python finds its file
            must["module"] = program.name
        else:
            with open(program.name, "rb") as file:
                must["script"] = _digest(file.read())
    should = {
        "python": platform.python_version().rpartition(".")[0],
        _ARGUMENTS: _digest("\0".join(program.args).encode()),
    }
    return MachineFacts(
        must | _settings(plan, _MUST_AGREE), should | _settings(plan, _SHOULD_AGREE)
    )


def _settings(plan: LaunchPlan, names: Sequence[str]) -> dict[str, str]:
    return {name: str(plan.settings.values[name].value) for name in names}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def differences(
    on_main: Mapping[str, str], here: Mapping[str, str], machine: str
) -> Iterator[tuple[str, str]]:
    """Yield the name of each value that differs, and a sentence about it."""
    for name in {**on_main, **here}:
        if here.get(name) == on_main.get(name):
            continue
        if name == _ARGUMENTS:  # their digests are meaningless to users
            yield name, f"{machine}: the script's {name} differ from machine 0's"
        else:
            values = f"{here.get(name, '-')}, but {on_main.get(name, '-')} on machine 0"
            yield name, f"{machine}: {name} {values}"


_MIN_LENGTH = 16  # of the key
HOW_TO_SET = f"set `{KEY_VARIABLE}` on all machines to the same output of `openssl rand -hex 16`"


def run_key(environ: Mapping[str, str]) -> bytes:
    """Return the run's key, or b"" if none is set; raises ConfigError if the key is too short."""
    key = environ.get(KEY_VARIABLE, "")
    if KEY_VARIABLE in environ and len(key) < _MIN_LENGTH:
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(key)} characters, which is too short for a key",
            where=f"environment {KEY_VARIABLE}",
            fix=HOW_TO_SET,
            code=Code.KEY,
        )
    return key.encode()


def describe_run_key(environ: Mapping[str, str]) -> str:
    if KEY_VARIABLE in environ:
        return f"machines authenticate each other with {KEY_VARIABLE}"
    return f"other programs on the network can join the run: {HOW_TO_SET}"
