"""Mapping of Accelerate's names to Headway's, used by `headway.compat`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

COMPAT = "headway.compat"
NATIVE = "headway"
ORIGINAL = "accelerate"

EXTRA_MODULES: dict[str, tuple[str, ...]] = {
    "accelerator": ("headway.utils",),
    "launchers": ("headway.notebook",),
    "memory_utils": ("headway.utils",),
}
"""Headway modules that also define names of an Accelerate module, keyed by that module's path
below `accelerate`. Headway's module of the same name is searched first."""


def _paths(module: str, names: str) -> dict[str, str]:
    return {name: f"{NATIVE}.{module}.{name}" for name in names.split()}


_BATCH_SIZE = _paths("compat.utils", "find_executable_batch_size should_reduce_batch_size")
_FSDP = "load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer"

DEFINITIONS: dict[str, dict[str, str]] = {
    "": {
        **_paths("compat.accelerator", "Accelerator"),
        **_paths("compat.utils", "find_executable_batch_size"),
    },
    "accelerator": _paths("trackers.choice", "LOGGER_TYPE_TO_CLASS"),
    "optimizer": {"AcceleratedOptimizer": "headway.training.optimizer.PreparedOptimizer"},
    "scheduler": _paths("compat.accelerator", "AcceleratedScheduler"),
    "state": _paths("distributed.world", "DistributedType"),
    "memory_utils": _BATCH_SIZE,
    "utils": {
        **_BATCH_SIZE,
        **_paths("compat.utils.fsdp_utils", _FSDP),
        "DistributedOperationException": "headway.distributed.collectives.DifferentTensors",
    },
}
"""Paths of Headway's definitions, keyed by Accelerate's module and name; checked first."""


def headway_path(module: str, name: str) -> str | None:
    """Return the path of Headway's definition of a name in Accelerate's module; None if missing.

    `module` is relative to `accelerate`; "" is the package. A module in `utils` also has the names
    of `utils`.
    """
    for home in dict.fromkeys((module, "utils" if module.startswith("utils.") else module)):
        if name in DEFINITIONS.get(home, {}):
            return DEFINITIONS[home][name]
        for source in _sources(home):
            if name in public_names(source):
                return f"{source}.{name}"
    return None


def names_in(module: str) -> list[str]:
    forwarded = (name for source in _sources(module) for name in public_names(source))
    return sorted({*DEFINITIONS.get(module, {}), *forwarded})


def import_source(name: str) -> str | None:
    """Return the Headway module from which to import a name of any Accelerate module."""
    modules = import_module(f"{COMPAT}.forwarding").MODULES
    for module in ("", *sorted(name for name in modules if "." not in name)):
        home = headway_path(module, name)
        if home is not None:
            source = home.rpartition(".")[0]
            return source if source in _sources(module) else joined(COMPAT, module)
    return None


def module_for(module: str, names: list[str], *, compat: bool = False) -> str:
    """Return the module from which to import all names of an import statement.

    Names without a counterpart in Headway are ignored. With `compat`, return `headway.compat` or
    one of its modules.
    """
    native, like_original = joined(NATIVE, module), compat_module(module)
    missing = [name for name in names if not has(native, name)]
    if compat or len(missing) == len(names) or any(has(like_original, name) for name in missing):
        return like_original
    return native


def has(module: str, name: str) -> bool:
    if not module_exists(module):
        return False
    if module.startswith(COMPAT):
        return hasattr(import_module(module), name)
    return name in public_names(module)


def _sources(module: str) -> list[str]:
    native = joined(NATIVE, module)
    return [*([native] if module_exists(native) else ()), *EXTRA_MODULES.get(module, ())]


def public_names(module: str) -> frozenset[str]:
    """Return a module's public names: `__all__`, or the names that it defines."""
    found = import_module(module)
    defined = (
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    )
    return frozenset(getattr(found, "__all__", defined))


@cache
def module_exists(name: str) -> bool:
    """Return whether a module can be imported. The check imports the module's parents."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is not a package
        return False


def is_module(module: str) -> bool:
    is_function = module == "utils.tqdm"  # the function hides the module
    return not is_function and module_exists(joined(COMPAT, module))


def compat_module(module: str) -> str:
    """Return the module of `headway.compat` for a path relative to `accelerate`.

    If that module does not exist, return its nearest parent, which raises errors that suggest
    alternatives.
    """
    while module and not module_exists(joined(COMPAT, module)):
        module = module.rpartition(".")[0]
    return joined(COMPAT, module)


def joined(package: str, module: str) -> str:
    """Return the full name of a module below a package; "" is the package itself."""
    return f"{package}.{module}" if module else package
