"""The modules of this package, and their attributes: imported on first use from where they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from headway.migration.homes import COMPAT, home_of, is_module, names_in
from headway.migration.topics import raise_missing

_NAMES = """
big_modeling checkpointing commands hooks inference launchers local_sgd logging memory_utils
optimizer parallelism_config scheduler state test_utils tracking
utils.ao utils.bnb utils.constants utils.dataclasses utils.deepspeed utils.environment
utils.imports utils.launch utils.megatron_lm utils.memory utils.modeling
utils.offload utils.operations utils.other utils.random utils.rich utils.torch_xla utils.tqdm
utils.transformer_engine utils.versions
"""
MODULES = frozenset(_NAMES.split())
"""Those of Accelerate's modules that have no file here: all of their names are elsewhere."""


class Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname.removeprefix(f"{COMPAT}.") not in MODULES or not fullname.startswith(COMPAT):
            return None
        return spec_from_loader(fullname, self, is_package=fullname.endswith(".commands"))

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"], vars(module)["__dir__"] = forward(module.__name__)


def forward(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) of a module of this package.

    A name becomes an attribute on first use. An unknown name's error gives the alternative.
    """
    inside = module.removeprefix(COMPAT).removeprefix(".")

    def get(name: str) -> Any:
        # `inspect` asks all modules for these, amid the import of others too
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
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
