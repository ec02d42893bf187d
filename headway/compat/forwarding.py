"""Creates modules of this package on first import, and looks up their attributes in Headway.

`replace_accelerate` replaces Accelerate's runtime with Headway's for all imports of `accelerate`
in this process. Accelerate's runtime modules are not executed; `headway.compat` provides their
names. Accelerate's other modules are executed, but names that Headway implements are replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

from headway.errors import Code, UsageError
from headway.migration.mapping import COMPAT, ORIGINAL, headway_path, is_module, joined, names_in
from headway.migration.missing import feature_of_name, placeholder_class, raise_missing

_NAMES = """
accelerator big_modeling checkpointing commands data_loader hooks inference launchers local_sgd
logging memory_utils optimizer parallelism_config scheduler state test_utils tracking utils
utils.ao utils.bnb utils.constants utils.dataclasses utils.deepspeed utils.environment
utils.fsdp_utils utils.imports utils.launch utils.megatron_lm utils.memory utils.modeling
utils.offload utils.operations utils.other utils.random utils.rich utils.torch_xla utils.tqdm
utils.transformer_engine utils.versions
"""
MODULES = frozenset(_NAMES.split())
"""Accelerate's modules. Those without a file in this package forward all of their names."""


class Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname.removeprefix(f"{COMPAT}.") not in MODULES or not fullname.startswith(COMPAT):
            return None
        return spec_from_loader(fullname, self, is_package=fullname.endswith(".commands"))

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"], vars(module)["__dir__"] = forward(module.__name__)


def forward(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) for a module of this package.

    A name becomes an attribute on first use. The error for an unknown name suggests an alternative.
    """
    inside = module.removeprefix(COMPAT).removeprefix(".")

    def get(name: str) -> Any:
        # `inspect` reads these from all modules, also during an import
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home = headway_path(inside, name)
        if home is not None:
            source, _, attribute = home.rpartition(".")
            value = getattr(import_module(source), attribute)
        elif not name.startswith("_") and is_module(f"{inside}.{name}".removeprefix(".")):
            value = import_module(f"{module}.{name}")
        else:
            raise_missing(inside, name, module)
        vars(sys.modules[module])[name] = value
        return value

    return get, lambda: sorted({*vars(sys.modules[module]), *names_in(inside)})


RUNTIME = frozenset(
    (
        *("accelerator", "checkpointing", "data_loader", "launchers", "local_sgd", "logging"),
        *("memory_utils", "optimizer", "scheduler", "state", "tracking"),
        *("utils.memory", "utils.operations", "utils.random", "utils.tqdm"),
    )
)


def replace_accelerate() -> None:
    """Replace Accelerate with Headway's runtime for all later imports in this process.

    Scripts and libraries (transformers' Trainer, TRL, diffusers) need no changes. Code unrelated to
    the runtime, such as device maps, comes from the installed Accelerate. `headway launch
    --replace-accelerate` does the same in all ranks.

    Raises:
        UsageError: Accelerate is not installed or is already imported.

    Examples:
        >>> import headway
        >>> headway.replace_accelerate()
        >>> from accelerate import Accelerator
        >>> issubclass(Accelerator, headway.Accelerator)
        True
    """
    if any(isinstance(finder, _Replacement) for finder in sys.meta_path):
        return
    if ORIGINAL in sys.modules:
        raise UsageError(
            "accelerate is already imported, so this process would have two runtimes",
            where="the script's replace_accelerate()",
            fix="call it before the first import of accelerate and of libraries that import it"
            " (trl, peft, diffusers), or start the script with"
            " `headway launch --replace-accelerate`",
            code=Code.TWO_RUNTIMES,
        )
    if find_spec(ORIGINAL) is None:
        raise UsageError(
            "accelerate is not installed, so it cannot be replaced",
            where="replace_accelerate",
            fix="`pip install accelerate`; or change the script's imports with `headway adopt`",
            code=Code.NOT_INSTALLED,
        )
    sys.meta_path.insert(0, _Replacement())


class _Replacement(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not f"{fullname}.".startswith(f"{ORIGINAL}."):
            return None
        module = fullname.removeprefix(ORIGINAL).removeprefix(".")
        finders = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        found = next(filter(None, specs), None)
        if found is None or not found.has_location:
            return None
        if module in RUNTIME:
            return spec_from_loader(fullname, _Runtime(module))
        found.loader = _PatchingLoader(module, found.loader)
        return found


class _PatchingLoader(Loader):
    """Executes a module of the installed Accelerate; replaces names that Headway implements."""

    def __init__(self, module: str, own: Any) -> None:
        self._module, self._own = module, own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._own.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if not self._module:  # accelerate imports these first
            for name in ("utils", *sorted(RUNTIME)):
                import_module(f"{ORIGINAL}.{name}")
        self._own.exec_module(module)
        if self._module.partition(".")[0] not in ("", "utils") or not is_module(self._module):
            return
        for name, value in [*vars(module).items()]:
            if not name.startswith("_") and not isinstance(value, ModuleType):
                setattr(module, name, getattr(_compat(self._module), name, value))

    def __getattr__(self, name: str) -> Any:  # get_source() and others, for tracebacks
        return getattr(self._own, name)


class _Runtime(Loader):
    """Creates a module with Headway's names; Accelerate's other names raise an error when called.

    The installed module is not executed. `module` is its name relative to `accelerate`.
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
        value = getattr(_compat(self._module), name, _ABSENT)
        if value is not _ABSENT:
            return value
        feature = feature_of_name(self._module, name)
        return _ABSENT if feature is None else placeholder_class(name, feature, f"{asked}.{name}")


_ABSENT = object()


def _compat(module: str) -> ModuleType:
    return import_module(joined(COMPAT, module))
