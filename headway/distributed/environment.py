"""Environment variables: reads flags and numbers, and changes them for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
