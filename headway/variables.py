"""Environment variables: reads flags and numbers, and changes them for a while."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from headway.contract.run import YES
from headway.errors import WrongValue

_NO = ("0", "false", "f", "no", "n", "off")  # as in Accelerate


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return whether `value` means yes (1, true, t, yes, y, on) or no (0, false, f, no, n, off).

    Args:
        to_bool: return True or False instead of 1 or 0.

    Raises:
        WrongValue: it means neither.
    """
    lowered = value.lower()
    if lowered not in (*YES, *_NO):
        raise WrongValue(
            f"{value!r} means neither yes nor no",
            where="str_to_bool(...)",
            fix=f"use one of {', '.join((*YES, *_NO))}",
        )
    return lowered in YES if to_bool else int(lowered in YES)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether the variable `key` means yes; `default` where it is not set.

    Raises:
        WrongValue: it means neither yes nor no.
    """
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable `key`; `default` where it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first number of at least 0 among the variables `env_keys`, else `default`.

    Raises:
        ValueError: a variable is not a whole number.
    """
    numbers = (int(os.environ.get(key, -1)) for key in env_keys)
    return next((number for number in numbers if number >= 0), default)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables in a context: `with patch_environment(foo=1)` sets FOO to "1".

    Afterwards the variables are as they were before.
    """
    values = {key.upper(): str(value) for key, value in kwargs.items()}
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all environment variables in a context; afterwards they are as they were before."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
