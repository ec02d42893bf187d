"""Gives whatever imports `accelerate` Headway's runtime, in this process.

The modules of Accelerate's runtime are never executed: their names are those of `headway.compat`.
All others are the installed Accelerate's own, in which the names that Headway has are Headway's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import headway.compat
from headway.errors import UsageError
from headway.migration.homes import COMPAT, ORIGINAL, is_module, joined
from headway.migration.topics import refused_when_called, topic_of_name

RUNTIME = frozenset(
    (
        *("accelerator", "checkpointing", "data_loader", "launchers", "local_sgd", "logging"),
        *("memory_utils", "optimizer", "scheduler", "state", "tracking"),
        *("utils.memory", "utils.operations", "utils.random", "utils.tqdm"),
    )
)
"""Accelerate's modules, below `accelerate`, that are its runtime."""


def replace_accelerate() -> None:
    """Make all imports of `accelerate` in this process give Headway's runtime, from now on.

    Scripts and libraries (transformers' Trainer, TRL, diffusers) stay as they are. What has nothing
    to do with the runtime, such as device maps, is the installed Accelerate's; without one it is
    refused when it is called. `headway launch --replace-accelerate` does the same in all ranks.

    Raises:
        UsageError: Accelerate itself has been imported already.

    Examples:
        >>> import headway
        >>> headway.replace_accelerate()
        >>> from accelerate import Accelerator
        >>> issubclass(Accelerator, headway.Accelerator)
        True
    """
    if any(isinstance(one, _Replacement) for one in sys.meta_path):
        return
    if ORIGINAL in sys.modules:
        raise UsageError(
            "accelerate has been imported already, so two runtimes would be in one process",
            where="the script's replace_accelerate()",
            fix="call it before the first import of accelerate, and of libraries that import it"
            " (trl, peft, diffusers), or start the script with"
            " `headway launch --replace-accelerate`",
        )
    sys.meta_path.insert(0, _Replacement())


class _Replacement(MetaPathFinder):
    """Finds `accelerate` and its modules; says that it is installed where it is not."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not f"{fullname}.".startswith(f"{ORIGINAL}."):
            return None
        module = fullname.removeprefix(ORIGINAL).removeprefix(".")
        found = _found_by_others(self, fullname, path, target)
        if module in RUNTIME or (found is None and is_module(module)):
            is_package = module in ("", "utils", "commands", "test_utils")
            return spec_from_loader(fullname, _Runtime(module), is_package=is_package)
        if found is not None:
            found.loader = _Kept(module, found.loader)
        return found

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Yield a distribution for libraries that ask which version of Accelerate there is."""
        is_asked = context.name in (None, ORIGINAL)
        if is_asked and _found_by_others(self, ORIGINAL, None, None) is None:
            yield _StandIn()


def _found_by_others(
    own: MetaPathFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Return how the installed Accelerate's module is imported; a bare folder is none."""
    for finder in sys.meta_path:
        if finder is not own and hasattr(finder, "find_spec"):
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec if spec.has_location else None
    return None


class _StandIn(Distribution):
    """Accelerate as a distribution, of the version whose behaviour is that of `headway.compat`."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {ORIGINAL}\nVersion: {headway.compat.__version__}\n"

    def locate_file(self, path: Any) -> Path:
        return Path(headway.compat.__path__[0], path)


class _Kept(Loader):
    """Executes a module of the installed Accelerate; names that Headway has become Headway's."""

    def __init__(self, module: str, own: Any) -> None:
        self._module, self._own = module, own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._own.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if not self._module:  # the runtime imports these there, before all else
            for name in ("utils", *sorted(RUNTIME)):
                import_module(f"{ORIGINAL}.{name}")
        self._own.exec_module(module)
        if self._module.partition(".")[0] not in ("", "utils") or not is_module(self._module):
            return
        for name, value in [*vars(module).items()]:
            if not name.startswith("_") and not isinstance(value, ModuleType):
                setattr(module, name, _ours(self._module, name, value))

    def __getattr__(self, name: str) -> Any:  # get_source() and others, for tracebacks
        return getattr(self._own, name)


class _Runtime(Loader):
    """Makes a module of Headway's names; others that Accelerate has there are refused when called.

    The installed Accelerate's is not executed. `module` is the name below `accelerate`.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def exec_module(self, module: ModuleType) -> None:
        def get(name: str) -> Any:
            value = _ABSENT if name.startswith("__") else self._value(name, module.__name__)
            if value is _ABSENT:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            setattr(module, name, value)
            return value

        vars(module)["__getattr__"] = get
        vars(module)["__dir__"] = lambda: sorted({*vars(module), *dir(_compat(self._module))})
        if not self._module:
            vars(module)["__version__"] = headway.compat.__version__

    def _value(self, name: str, asked: str) -> Any:
        if is_module(f"{self._module}.{name}".removeprefix(".")):
            return import_module(f"{asked}.{name}")
        value = _ours(self._module, name, _ABSENT)
        if value is not _ABSENT:
            return value
        topic = topic_of_name(self._module, name)
        return _ABSENT if topic is None else refused_when_called(name, topic, f"{asked}.{name}")


_ABSENT = object()


def _compat(module: str) -> ModuleType:
    return import_module(joined(COMPAT, module))


def _ours(module: str, name: str, otherwise: Any) -> Any:
    """Return what Headway has under a name of Accelerate's module, or else `otherwise`."""
    return getattr(_compat(module), name, otherwise)
