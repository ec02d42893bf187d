"""Provides the torch that the fork server imported when the script imports torch.

Until its `import torch`, no module of torch or numpy is in `sys.modules`, and none of their warning
filters is set. torch and OpenMP have already read their environment variables: if the script
changes one before its own `import torch`, which works under plain python, a note is printed.
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

from headway.contract.notes import say
from headway.launcher.rank.rank_monitor import AfterImport

READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "MKLDNN_", "ONEDNN_", "DNNL_"),
    *("TORCH_LOGS", "TORCH_TRACE", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_COMPILE_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("TORCH_CUDA_SANITIZER", "PYTORCH_JIT", "PYTORCH_ENABLE_MPS_FALLBACK"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
"""Prefixes of the variables that `import torch` reads, found by logging calls of getenv."""

_filters: dict[str, list[tuple[Any, ...]]] = {}  # by package: those that its import sets


@contextmanager
def recorded_filters() -> Iterator[None]:
    """Record the warning filters that an import of torch sets, its own and numpy's; unset them."""
    before = list(warnings.filters)
    known = before[:]

    def record(package: str) -> None:
        new = [one for one in warnings.filters if not any(one is other for other in known)]
        _filters[package] = new
        known.extend(new)

    numpy = AfterImport("numpy", lambda _: record("numpy"))
    sys.meta_path.insert(0, numpy)
    yield
    with suppress(ValueError):  # torch has imported numpy
        sys.meta_path.remove(numpy)
    record("torch")
    warnings.resetwarnings()  # also clears Python's cache of decisions
    warnings.filters[:] = before  # type: ignore[index]


def hand_out_torch() -> None:
    """Remove torch and numpy from `sys.modules` until the script imports them."""
    imports = [name for name in _filters if name != "torch"]
    warn = functools.partial(_warn_of_changes, _read_at_import(os.environ))
    sys.meta_path[:0] = [*map(_Preloaded, imports), _Preloaded("torch", imports, warn)]


class _Preloaded:
    """Import hook that finds and loads a package from the modules that the fork server imported.

    It `imports` other preloaded packages before it sets a filter.
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
        with suppress(ValueError):  # the script may have removed it
            sys.meta_path.remove(self)
        for name, one in self._modules.items():
            sys.modules.setdefault(name, one)  # the script may have put a mock there
        for name in self._imports:
            with suppress(ImportError):  # the script may block it; torch works without
                importlib.import_module(name)
        _set_filters(_filters[self._package])
        self._then()


def _set_filters(filters: Sequence[tuple[Any, ...]]) -> None:
    """Set them as the package does."""
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(
            action,
            message=message.pattern if message else "",
            category=category,
            module=module.pattern if module else "",
            lineno=line,
        )


def _warn_of_changes(variables: Mapping[str, str]) -> None:
    """Print which variables that torch has read have changed since they were `variables`."""
    now = _read_at_import(os.environ)
    changed = [name for name in sorted({*now, *variables}) if now.get(name) != variables.get(name)]
    if changed and os.environ.get("LOCAL_RANK") == "0":
        say(
            f"note: the script sets {', '.join(changed)}, which torch read before the "
            "script began; set it with `env:` in the profile or --env NAME=VALUE, or pass "
            "--set start_method=exec"
        )


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(READ_AT_IMPORT)}
