"""Messages between a launch over ssh and its agents, and the forwarded environment variables.

Messages are lines of JSON that are sent over ssh, which has authenticated both sides. The
agents' lines start with a secret word, because login shells and ranks write to the same stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headway.ipc.run_contract import (
    ALLOCATION_VARIABLE,
    CODE_VARIABLE,
    KEY_VARIABLE,
    RECORD_VARIABLE,
)
from headway.ipc.run_contract import VARIABLE as RUN_VARIABLE

_HOST_VARIABLES = (
    # variables of a user's login on a machine
    *("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "HOST", "PWD", "OLDPWD", "SHLVL"),
    *("_", "TERM", "TMPDIR", "DISPLAY", "XAUTHORITY", "KRB5CCNAME", "TTY", "GPG_TTY"),
    # GPUs selected on a machine
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
_HOST_PREFIXES = ("SSH_", "XDG_", "DBUS_")

RUN_VARIABLES = (RUN_VARIABLE, ALLOCATION_VARIABLE, KEY_VARIABLE, RECORD_VARIABLE, CODE_VARIABLE)
"""Variables that describe one run, and are not passed to another run."""


class AgentSetup(NamedTuple):
    """The first message to an agent: the folder, script and environment of the launch."""

    mark: str  # at the start of the agent's lines
    folder: str  # the working directory
    script: str | None  # a file, which must exist
    variables: Mapping[str, str]  # the environment of the launch


class HostReply(NamedTuple):
    """The reply to AgentSetup: whether the host can run the launch, and the host's address."""

    problem: str = ""  # why the launch cannot run there
    address: str = ""  # at which ssh reached the host
    port: int = 0  # a free port
    client_address: str = ""  # the address of ssh's client, as the host sees it


class StartLaunch(NamedTuple):
    """The request to run `headway launch` with these arguments and this key."""

    words: tuple[str, ...]
    key: str
    stops_within_s: float  # the launch is killed this long after a stop signal


class Signal(NamedTuple):
    number: int


class LaunchEnd(NamedTuple):
    """The result of a launch, sent as the agent's last message."""

    exit_code: int
    report: str  # the printed error


def forwarded_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this environment that a launch on another host should get."""
    return {
        name: value
        for name, value in environ.items()
        if name not in RUN_VARIABLES and not _is_host_variable(name)
    }


def remote_env(own: Mapping[str, str], forwarded_env: Mapping[str, str]) -> dict[str, str]:
    """Return a launch's environment: the forwarded variables and the host's own variables."""
    return {**{name: own[name] for name in own if _is_host_variable(name)}, **forwarded_env}


def _is_host_variable(name: str) -> bool:
    return name in _HOST_VARIABLES or name.startswith(_HOST_PREFIXES)
