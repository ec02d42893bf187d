"""Hands the script the torch that the server imported, as if it were imported only now.

Until then no module of torch's or numpy's is in `sys.modules`, and none of their warning filters is
set. What torch and OpenMP read from the environment they have read already: a script that changes
such a variable before its own `import torch`, which works under plain python, is told so.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from headway.launcher.inside.rank_monitor import AfterImport

READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "MKLDNN_", "ONEDNN_", "DNNL_"),
    *("TORCH_LOGS", "TORCH_TRACE", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_COMPILE_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("TORCH_CUDA_SANITIZER", "PYTORCH_JIT", "PYTORCH_ENABLE_MPS_FALLBACK"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
"""Beginnings of the names that `import torch` reads, as a noting `getenv` has shown."""


_filters: dict[str, list[tuple[Any, ...]]] = {}  # by package, those that come with its import


@contextmanager
def noting_filters() -> Iterator[None]:
    """Note the warning filters that an import of torch sets, its own and numpy's; unset them."""
    before = list(warnings.filters)
    known = before[:]

    def note(package: str) -> None:
        new = [one for one in warnings.filters if not any(one is other for other in known)]
        _filters[package] = new
        known.extend(new)

    numpy = AfterImport("numpy", lambda _: note("numpy"))
    sys.meta_path.insert(0, numpy)
    yield
    with suppress(ValueError):  # torch has imported numpy
        sys.meta_path.remove(numpy)
    note("torch")
    warnings.resetwarnings()  # also makes Python forget what it has decided by them
    warnings.filters[:] = before  # type: ignore[index]


def hand_out_torch() -> None:
    """Take torch, and numpy with it, out of `sys.modules` until the script imports them."""
    imports = [name for name in _filters if name != "torch"]
    tell = functools.partial(_tell_changes, _read_at_import(os.environ))
    sys.meta_path[:0] = [*map(_Preloaded, imports), _Preloaded("torch", imports, tell)]


class _Preloaded:
    """Finds and loads a package by giving the modules of it that there are.

    Args:
        package: its name.
        imports: the packages handed out likewise that it imports before it sets a filter.
        then: is called at the end of the import.
    """

    def __init__(
        self, package: str, imports: Sequence[str] = (), then: Callable[[], None] = lambda: None
    ) -> None:
        names = [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]
        self._package = package
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._spec = self._modules[package].__spec__
        self._imports = imports
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if name != self._package or self._spec is None:
            return None
        spec = ModuleSpec(name, self, origin=self._spec.origin)  # type: ignore[arg-type]
        spec.submodule_search_locations = self._spec.submodule_search_locations
        spec.cached = self._spec.cached
        spec.has_location = True
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[self._package]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        with suppress(ValueError):  # the script may have taken it out itself
            sys.meta_path.remove(self)
        for name, one in self._modules.items():
            sys.modules.setdefault(name, one)  # the script may have put a stand-in there
        for name in self._imports:
            with suppress(ImportError):  # the script may forbid it; torch does without
                importlib.import_module(name)
        _set_filters(_filters[self._package])
        self._then()


def _set_filters(filters: Sequence[tuple[Any, ...]]) -> None:
    """Set them as the package does, by the public function, which knows where they belong."""
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(
            action,
            message=message.pattern if message else "",
            category=category,
            module=module.pattern if module else "",
            lineno=line,
        )


def _tell_changes(variables: Mapping[str, str]) -> None:
    """Say which variables that torch has read are no longer as they were in `variables`."""
    now = _read_at_import(os.environ)
    changed = [name for name in sorted({*now, *variables}) if now.get(name) != variables.get(name)]
    if changed and os.environ.get("LOCAL_RANK") == "0":
        print(
            f"headway: note: the script sets {', '.join(changed)}, which torch read before the "
            "script began; set it with `env:` in the profile or --env NAME=VALUE, or pass "
            "--start-method exec",
            file=sys.stderr,
            flush=True,
        )


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(READ_AT_IMPORT)}
