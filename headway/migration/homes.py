"""Where Headway has the names of Accelerate's modules: the table behind `headway.compat`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

COMPAT = "headway.compat"
NATIVE = "headway"
ORIGINAL = "accelerate"

FORWARDED: dict[str, tuple[str, ...]] = {
    "": ("headway",),
    "memory_utils": ("headway.utils",),
    "utils": ("headway.utils",),
}
"""Accelerate's module, below `accelerate` -> the modules of Headway whose `__all__` it shares."""

HOMES: dict[str, dict[str, str]] = {
    "": {"Accelerator": "headway.compat.accelerator.Accelerator"},
    "optimizer": {"AcceleratedOptimizer": "headway.optimizer.PreparedOptimizer"},
    "state": {"DistributedType": "headway.world.DistributedType"},
}
"""Accelerate's module -> the single names of it, and where Headway defines each; these go first."""


HIDDEN_MODULES = {"utils.tqdm"}
"""Modules that a name of their package hides: `accelerate.utils.tqdm` is a function."""


def home_of(module: str, name: str) -> str | None:
    """Return where Headway defines a name of Accelerate's module, if it does.

    Args:
        module: below `accelerate`, such as `utils.operations`; `` for the package itself. A part of
            `utils` has all names of `utils`.
        name: the name in that module.
    """
    for one in dict.fromkeys((module, "utils" if module.startswith("utils.") else module)):
        if name in HOMES.get(one, {}):
            return HOMES[one][name]
        for source in FORWARDED.get(one, ()):
            if name in import_module(source).__all__:
                return f"{source}.{name}"
    return None


def names_in(module: str) -> list[str]:
    """Return the names of Accelerate's module that Headway has."""
    forwarded = (import_module(source).__all__ for source in FORWARDED.get(module, ()))
    return sorted({*HOMES.get(module, {}), *(name for names in forwarded for name in names)})


def homes_of(name: str) -> list[str]:
    """Return the modules of Headway to import a name from, the best one first."""
    sources = [source for group in FORWARDED.values() for source in group]
    found = [source for source in sources if name in import_module(source).__all__]
    return found + [joined(COMPAT, module) for module, names in HOMES.items() if name in names]


@cache
def module_exists(name: str) -> bool:
    """Return whether a module can be imported; its parents are."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not a package
        return False


def is_module(module: str) -> bool:
    """Return whether a path below `accelerate` means a module, which `headway.compat` has."""
    return module not in HIDDEN_MODULES and module_exists(joined(COMPAT, module))


def joined(package: str, module: str) -> str:
    """Return the full name of a module below a package; `` is the package itself."""
    return f"{package}.{module}" if module else package
