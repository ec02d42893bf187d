"""Gives whatever imports `accelerate` Headway's runtime, in this process.

The modules of the installed Accelerate's runtime are never executed: their names are those of
`headway.compat`. All others are its own, in which the names that Headway has are Headway's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

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


def replace_accelerate() -> None:
    """Make all imports of `accelerate` in this process give Headway's runtime, from now on.

    Scripts and libraries (transformers' Trainer, TRL, diffusers) stay as they are. What has nothing
    to do with the runtime, such as device maps, is the installed Accelerate's. `headway launch
    --replace-accelerate` does the same in all ranks.

    Raises:
        UsageError: Accelerate is not installed, or has been imported already.

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
    if find_spec(ORIGINAL) is None:
        raise UsageError(
            "accelerate is not installed, so there is nothing to replace",
            where="replace_accelerate",
            fix="pip install accelerate; or change the script's imports with `headway adopt`",
        )
    sys.meta_path.insert(0, _Replacement())


class _Replacement(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not f"{fullname}.".startswith(f"{ORIGINAL}."):
            return None
        module = fullname.removeprefix(ORIGINAL).removeprefix(".")
        found = _found_by_others(self, fullname, path, target)
        if found is None:
            return None
        if module in RUNTIME:
            return spec_from_loader(fullname, _Runtime(module))
        found.loader = _Kept(module, found.loader)
        return found


def _found_by_others(
    own: MetaPathFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is not own and hasattr(finder, "find_spec"):
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec if spec.has_location else None
    return None


class _Kept(Loader):
    """Executes a module of the installed Accelerate, and replaces names that Headway has."""

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
    """Makes a module of Headway's names; Accelerate's other names there refuse to be called.

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
    return getattr(_compat(module), name, otherwise)
