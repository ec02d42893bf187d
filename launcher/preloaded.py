"""Hands the script the torch that the server imported, as if it were imported only now.

What torch and OpenMP read from the environment they have read already: a script that changes such a
variable before its own `import torch`, which works under plain python, is told so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType

READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "MKLDNN_", "ONEDNN_", "DNNL_"),
    *("TORCH_LOGS", "TORCH_TRACE", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_COMPILE_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("TORCH_CUDA_SANITIZER", "PYTORCH_JIT", "PYTORCH_ENABLE_MPS_FALLBACK"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
"""Beginnings of the names that `import torch` reads, as a noting `getenv` has shown."""


def hand_out_torch() -> None:
    """Take torch out of `sys.modules` until the script imports it."""
    torch = sys.modules.pop("torch")
    sys.meta_path.insert(0, _Preloaded(torch, _read_at_import(os.environ)))


class _Preloaded:
    """Finds and loads `torch` by giving the module that there is."""

    def __init__(self, torch: ModuleType, variables: Mapping[str, str]) -> None:
        self._torch = torch
        self._spec = torch.__spec__
        self._variables = variables

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
        return self._torch

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        with suppress(ValueError):  # the script may have taken it out itself
            sys.meta_path.remove(self)
        now = _read_at_import(os.environ)
        changed = [
            name
            for name in sorted({*now, *self._variables})
            if now.get(name) != self._variables.get(name)
        ]
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
