"""What happens when the script imports torch or a training library; nothing before.

The torch that the fork server imported is provided when the script imports it: until then no module
of torch is in `sys.modules`. torch and OpenMP have already read their environment variables: if the
script changes one before its own `import torch`, which works under plain python, a note is printed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from headway.ipc.stderr import log
from headway.launcher.plan.program import HOOKS

READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "MKLDNN_", "ONEDNN_", "DNNL_"),
    *("TORCH_LOGS", "TORCH_TRACE", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_COMPILE_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("TORCH_CUDA_SANITIZER", "PYTORCH_JIT", "PYTORCH_ENABLE_MPS_FALLBACK"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
"""Prefixes of the variables that `import torch` reads, found by logging calls of getenv."""


def hide_torch() -> None:
    """Remove torch from `sys.modules` until the script imports it."""
    if "torch" in sys.modules:
        sys.meta_path.insert(0, _Preloaded())


class _Preloaded:
    """Import hook that finds and loads torch from the modules that the fork server imported."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if f"{name}.".startswith("torch.")]
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._spec = self._modules["torch"].__spec__
        self._variables = _read_at_import(os.environ)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if name != "torch" or self._spec is None:
            return None
        spec = ModuleSpec(name, self, origin=self._spec.origin)  # type: ignore[arg-type]
        spec.submodule_search_locations = self._spec.submodule_search_locations
        spec.cached = self._spec.cached
        spec.has_location = True
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules["torch"]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        with suppress(ValueError):  # the script may have removed it
            sys.meta_path.remove(self)
        for name, known in self._modules.items():
            sys.modules.setdefault(name, known)  # the script may have put a mock there
        _warn_of_changes(self._variables)


def _warn_of_changes(variables: Mapping[str, str]) -> None:
    """Print which variables that torch has read have changed since they were `variables`."""
    now = _read_at_import(os.environ)
    changed = [name for name in sorted({*now, *variables}) if now.get(name) != variables.get(name)]
    if changed and os.environ.get("LOCAL_RANK") == "0":
        log(
            f"note: the script sets {', '.join(changed)}, which torch read before the "
            "script began; set it with `env:` in the profile or --env NAME=VALUE, or pass "
            "--set start_method=exec"
        )


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(READ_AT_IMPORT)}


def hook_libraries() -> None:
    """Join the training libraries of `HOOKS`, once the script imports them."""
    for hook in HOOKS:
        _join_after_import(hook.module, hook.joins, "it does not save when the job is stopped")


def watch_steps() -> None:
    """Observe the steps of a script that trains by torch alone, after its import."""
    _join_after_import("torch", "headway.strategies.plain_steps", "its steps are not seen")


def _join_after_import(module: str, joins: str, otherwise: str) -> None:
    join = partial(_join, joins, otherwise)
    if (there := sys.modules.get(module)) is not None:
        join(there)
    else:
        sys.meta_path.insert(0, AfterImport(module, join))


def _join(joins: str, otherwise: str, library: ModuleType) -> None:
    try:
        importlib.import_module(joins).join(library)
    except Exception as error:  # noqa: BLE001  another version of the library, which works alone
        log(f"note: {library.__name__} is not joined: {type(error).__name__}: {error}; {otherwise}")


class AfterImport:
    """Import hook that calls a function with one module after its import, and removes itself."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name != self._name:
            return None
        with suppress(ValueError):  # the script may have removed it
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        loader.exec_module = execute_and_call
        return spec
