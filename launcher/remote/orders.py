"""What the launch over ssh and its agents on the hosts say to each other: lines of JSON; and which
variables of the environment go along.

Everything travels through ssh, which has authenticated both sides. The agents' lines begin with a
word that only this launch knows, because a login shell and the ranks write to the same stream.
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

_OF_ONE_HOST = (
    # one user's login on one machine
    *("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "HOST", "PWD", "OLDPWD", "SHLVL"),
    *("_", "TERM", "TMPDIR", "DISPLAY", "XAUTHORITY", "KRB5CCNAME", "TTY", "GPG_TTY"),
    # GPUs that somebody has chosen on one machine
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
_OF_ONE_HOST_PREFIXES = ("SSH_", "XDG_", "DBUS_")

OF_ONE_RUN = (*(RUN_VARIABLE, ALLOCATION_VARIABLE, KEY_VARIABLE, RECORD_VARIABLE, CODE_VARIABLE),)
"""Of a run that this process is a part of; another one has its own."""


class AgentSetup(NamedTuple):
    """The first words to an agent: where the launch is to run, and with what."""

    mark: str  # at the beginning of the agent's lines
    folder: str  # the working directory
    script: str | None  # a file, which has to be there
    variables: Mapping[str, str]  # the environment of the launch


class Found(NamedTuple):
    """Whether a launch can begin on a host, and how that is reached; the answer to an order."""

    fault: str = ""  # why nothing can run there
    address: str = ""  # at which ssh has reached the host
    port: int = 0  # a free one
    caller: str = ""  # the address of ssh's client, as the host sees it


class StartLaunch(NamedTuple):
    """Lets an agent run `headway launch` with these words, and its secret in the environment."""

    words: tuple[str, ...]
    key: str
    stops_within_s: float  # after a stop signal; then the launch is killed


class Signal(NamedTuple):
    number: int


class LaunchEnd(NamedTuple):
    """How the launch has ended: an agent's last words."""

    exit_code: int
    report: str  # the error, as it is printed


def forwarded_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a launch on another host gets from here."""
    return {
        name: value
        for name, value in environ.items()
        if name not in OF_ONE_RUN and not _is_of_one_host(name)
    }


def remote_env(own: Mapping[str, str], forwarded_env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a launch: the caller's, but the host's where it belongs to it."""
    return {**{name: own[name] for name in own if _is_of_one_host(name)}, **forwarded_env}


def _is_of_one_host(name: str) -> bool:
    return name in _OF_ONE_HOST or name.startswith(_OF_ONE_HOST_PREFIXES)
