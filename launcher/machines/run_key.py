"""The run's key, from the environment: what authenticates the machines of a run to each other."""

from __future__ import annotations

from collections.abc import Mapping

from headway.contract.run import KEY_VARIABLE
from headway.errors import ConfigError

_MIN_LENGTH = 16
HOW_TO_SET = f"`export {KEY_VARIABLE}=$(openssl rand -hex 16)`, and the same value on every machine"


def run_key(environ: Mapping[str, str]) -> bytes:
    """Return the key; empty where there is none. Raises ConfigError for one that is too short."""
    key = environ.get(KEY_VARIABLE, "")
    if KEY_VARIABLE in environ and len(key) < _MIN_LENGTH:
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(key)} characters, which is too short for a key",
            where=f"environment {KEY_VARIABLE}",
            fix=HOW_TO_SET,
        )
    return key.encode()


def describe_run_key(environ: Mapping[str, str]) -> str:
    if KEY_VARIABLE in environ:
        return f"machines know each other by {KEY_VARIABLE}"
    return f"nothing keeps other programs of the network out of the run: {HOW_TO_SET}"
