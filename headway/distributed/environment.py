"""Environment variables: reads flags and numbers, and changes them for a while."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from headway.contract.run import YES
from headway.errors import UsageError

_NO = ("0", "false", "f", "no", "n", "off")  # as in Accelerate


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return whether `value` means yes (1, true, t, yes, y, on) or no (0, false, f, no, n, off).

    Args:
        to_bool: return True or False instead of 1 or 0.

    Raises:
        UsageError: it means neither.

    Examples:
        >>> from headway.utils import str_to_bool
        >>> str_to_bool("yes"), str_to_bool("off", to_bool=True)
        (1, False)
    """
    lowered = value.lower()
    if lowered not in (*YES, *_NO):
        raise UsageError(
            f"{value!r} means neither yes nor no",
            where="str_to_bool(...)",
            fix=f"use one of {', '.join((*YES, *_NO))}",
        )
    return lowered in YES if to_bool else int(lowered in YES)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether the variable `key` means yes; `default` where it is not set.

    Raises:
        UsageError: it means neither yes nor no.

    Examples:
        >>> from headway.utils import parse_flag_from_env, patch_environment
        >>> with patch_environment(my_debug="yes"):
        ...     parse_flag_from_env("MY_DEBUG")
        True
    """
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable `key`; `default` where it is not set.

    Examples:
        >>> from headway.utils import parse_choice_from_env
        >>> parse_choice_from_env("MY_PRECISION", default="bf16")
        'bf16'
    """
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first number of at least 0 among the variables `env_keys`, else `default`.

    Raises:
        ValueError: a variable is not a whole number.

    Examples:
        >>> from headway.utils import get_int_from_env, patch_environment
        >>> with patch_environment(my_workers=4):
        ...     get_int_from_env(["MY_THREADS", "MY_WORKERS"], default=1)
        4
    """
    numbers = (int(os.environ.get(key, -1)) for key in env_keys)
    return next((number for number in numbers if number >= 0), default)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables in a context: `with patch_environment(foo=1)` sets FOO to "1".

    Afterwards the variables are as they were before.

    Examples:
        >>> import os
        >>> from headway.utils import patch_environment
        >>> with patch_environment(my_variable=1):
        ...     os.environ["MY_VARIABLE"]
        '1'
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
    """Remove all environment variables in a context; afterwards they are as they were before.

    Examples:
        >>> import os
        >>> from headway.utils import clear_environment
        >>> with clear_environment():
        ...     len(os.environ)
        0
    """
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
