"""The attributes of this package's modules, imported on first use from where Headway has them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from headway.migration.homes import COMPAT, home_of, is_module, names_in
from headway.migration.missing import raise_missing


def forward(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) of a module of this package.

    A name that has been used once is an attribute like any other. One that Headway does not have
    is an error that says what to use instead.

    Args:
        module: its `__name__`.
    """
    inside = module.removeprefix(COMPAT).removeprefix(".")

    def get(name: str) -> Any:
        home = home_of(inside, name)
        if home is not None:
            source, _, attribute = home.rpartition(".")
            value = getattr(import_module(source), attribute)
        elif not name.startswith("_") and is_module(f"{inside}.{name}".removeprefix(".")):
            value = import_module(f"{module}.{name}")
        else:
            raise_missing(inside, name, module)
        vars(sys.modules[module])[name] = value
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *names_in(inside)})

    return get, list_names
