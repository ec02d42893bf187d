"""Replaces functions of other packages, for the rest of a process that only follows a script."""

from __future__ import annotations

import sys
from typing import Any


def replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute that a class or module has.

    Raises:
        AttributeError: it has none of this name: torch has changed.
    """
    getattr(owner, name)
    setattr(owner, name, value)


def replace_wherever_imported(name: str, value: Any) -> None:
    """Set a function in every module that has it: those that define and those that import it.

    Raises:
        AttributeError: no module has it: torch has changed.
    """
    found = [
        module for module in [*sys.modules.values()] if name in getattr(module, "__dict__", ())
    ]
    if not found:
        raise AttributeError(name)
    for module in found:
        setattr(module, name, value)
