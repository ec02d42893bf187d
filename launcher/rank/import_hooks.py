"""Import hooks for torch and training libraries.

torch modules that the fork server imported are hidden from `sys.modules` until the script imports
torch. By then, torch and OpenMP have read their environment variables. If the script changes one of
these variables before its own `import torch`, a note is logged, because in plain Python the change
would take effect.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from headway.ipc.stderr import log
from headway.launcher.plan.program import HOOKS

READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "MKLDNN_", "ONEDNN_", "DNNL_"),
    *("TORCH_LOGS", "TORCH_TRACE", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_COMPILE_CACHE_", "TORCH_COMPILE_DEBUG", "TORCH_COMPILE_DYNAMIC_", "TORCH_COMPILE_ST"),
    *("TORCH_COMPILE_FORCE_", "TORCH_COMPILE_JOB_ID", "TORCH_COMPILE_UNBACKED_"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_", "TORCH_LINALG_PREFER_"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTORCH_CUDA_ALLOC_CONF"),
    *("TORCH_CUDA_SANITIZER", "PYTORCH_JIT", "PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_ALLOC_CONF"),
)
"""Prefixes of the variables that `import torch` reads, as found by logging calls to getenv."""

_AT_START = {*sys.builtin_module_names, "_collections_abc", "_sitebuiltins", "abc", "codecs", "io"}
_AT_START |= {"encodings", "genericpath", "importlib", "os", "posixpath", "runpy", "site", "stat"}
"""Modules with which Python starts, which no file in the script's folder replaces."""


def prefer_modules_in(folder: str) -> None:
    """Import the modules in the script's folder, even if others of these names are imported.

    Headway has imported modules of the standard library, numpy and others before the script starts.
    In plain Python, modules in the script's folder precede them.
    """
    try:
        names = {name.removesuffix(".py") for name in os.listdir(folder)}
    except OSError:
        return
    for name in (names & sys.modules.keys()) - _AT_START - {"__main__", "headway"}:
        spec = PathFinder.find_spec(name, [folder])
        known = os.path.realpath(str(getattr(sys.modules[name], "__file__", None)))
        if spec is not None and spec.origin and os.path.realpath(spec.origin) != known:
            for part in [part for part in sys.modules if f"{part}.".startswith(f"{name}.")]:
                del sys.modules[part]


def hide_torch() -> None:
    """Remove torch from `sys.modules` until the script imports it."""
    if "torch" in sys.modules:
        sys.meta_path.insert(0, _PreloadedTorch())


class _PreloadedTorch:
    """An import hook that loads torch from the modules that the fork server imported."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if f"{name}.".startswith("torch.")]
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._spec = self._modules["torch"].__spec__
        compiler = ("TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_") * ("torch._dynamo" in names)
        self._prefixes = (*READ_AT_IMPORT, *compiler)
        self._variables = _starting_with(self._prefixes)

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
        _warn_of_changes(self._variables, _starting_with(self._prefixes))


def _warn_of_changes(variables: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Log the variables that the script changed after torch had read them."""
    changed = [name for name in sorted({*now, *variables}) if now.get(name) != variables.get(name)]
    if changed and os.environ.get("LOCAL_RANK") == "0":
        log(
            f"note: the script sets {', '.join(changed)}, but torch read the environment before "
            "the script started; set variables with `env:` in the profile or --env NAME=VALUE, or "
            "pass --set start_method=exec"
        )


def _starting_with(prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def hook_libraries() -> None:
    """Hook into the training libraries in `HOOKS` when the script imports them."""
    for hook in HOOKS:
        install = partial(_install_hook, hook.installer, "it does not save when the job is stopped")
        call_after_import(hook.module, install)


def watch_steps() -> None:
    """Count the steps of a script that trains with plain torch."""
    installer = "headway.strategies.plain_steps"
    call_after_import("torch", partial(_install_hook, installer, "its steps are not counted"))


def _install_hook(installer: str, otherwise: str, library: ModuleType) -> None:
    try:
        importlib.import_module(installer).install(library)
    except Exception as error:  # noqa: BLE001  an unsupported version, which works without the hook
        log(f"note: {library.__name__} is not hooked: {type(error).__name__}: {error}; {otherwise}")


def call_after_import(module: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with a module: now if it is imported, otherwise after its first import."""
    if (loaded := sys.modules.get(module)) is not None:
        then(loaded)
    else:
        sys.meta_path.insert(0, AfterImport(module, then))


class AfterImport:
    """An import hook that calls a function with a module after the module's first import."""

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
