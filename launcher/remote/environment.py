"""Which variables of the environment a launch on another host gets from here. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from headway.contract.run import ALLOCATION_VARIABLE, KEY_VARIABLE, RECORD_VARIABLE
from headway.contract.run import VARIABLE as RUN_VARIABLE

_OF_ONE_HOST = (
    # one user's login on one machine
    *("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "HOST", "PWD", "OLDPWD", "SHLVL"),
    *("_", "TERM", "TMPDIR", "DISPLAY", "XAUTHORITY", "KRB5CCNAME", "TTY", "GPG_TTY"),
    # GPUs that somebody has chosen on one machine
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
_OF_ONE_HOST_PREFIXES = ("SSH_", "XDG_", "DBUS_")

OF_ONE_RUN = (RUN_VARIABLE, ALLOCATION_VARIABLE, KEY_VARIABLE, RECORD_VARIABLE)
"""Of a run that this process is a part of; another one has its own."""


def handed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a launch on another host gets from here."""
    return {
        name: value
        for name, value in environ.items()
        if name not in OF_ONE_RUN and not _is_of_one_host(name)
    }


def environment_there(own: Mapping[str, str], handed_on: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a launch: the caller's, but for what belongs to the host, its own."""
    return {**{name: own[name] for name in own if _is_of_one_host(name)}, **handed_on}


def _is_of_one_host(name: str) -> bool:
    return name in _OF_ONE_HOST or name.startswith(_OF_ONE_HOST_PREFIXES)
