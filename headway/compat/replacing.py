"""Gives whatever imports `accelerate` Headway's runtime, in this process.

The modules of Accelerate's runtime are never executed: their names are those of `headway.compat`.
All others are the installed Accelerate's own, in which the names that Headway has are Headway's.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import resolve_name, spec_from_loader
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
    """Let all imports of `accelerate` in this process give Headway's runtime, from now on.

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
            return spec_from_loader(fullname, _Runtime(module, found), is_package=is_package)
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

    Args:
        module: its name below `accelerate`.
        found: the installed Accelerate's, which is not executed; None if there is none.
    """

    def __init__(self, module: str, found: ModuleSpec | None) -> None:
        self._module, self._found = module, found

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
        source, attribute = self._bound.get(name, ("", ""))
        if source:
            with suppress(ImportError):  # of a package that is not installed
                value = import_module(source)
                return getattr(value, attribute, _ABSENT) if attribute else value
            return _ABSENT
        topic = topic_of_name(self._module, name)
        is_there = topic is not None if self._found is None else name in self._bound
        return refused_when_called(name, topic, f"{asked}.{name}") if is_there else _ABSENT

    @cached_property
    def _bound(self) -> dict[str, tuple[str, str]]:
        """The names that Accelerate's module binds: what it imports them from, if it does."""
        if self._found is None:
            return {}
        loader: Any = self._found.loader
        return dict(_bound_in(ast.parse(loader.get_source(self._found.name)), self._found.parent))


_ABSENT = object()


def _compat(module: str) -> ModuleType:
    return import_module(joined(COMPAT, module))


def _ours(module: str, name: str, otherwise: Any) -> Any:
    """Return what Headway has under a name of Accelerate's module, or else `otherwise`."""
    return getattr(_compat(module), name, otherwise)


def _bound_in(node: ast.AST, package: str | None) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the names that a module binds, each with the module and name that it is imported as."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child.name, ("", "")
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id, ("", "")
        elif isinstance(child, ast.Import):
            for one in child.names:
                root = one.name.partition(".")[0]
                yield (one.asname, (one.name, "")) if one.asname else (root, (root, ""))
        elif isinstance(child, ast.ImportFrom):
            source = resolve_name("." * child.level + (child.module or ""), package)
            yield from ((one.asname or one.name, (source, one.name)) for one in child.names)
        else:
            yield from _bound_in(child, package)
