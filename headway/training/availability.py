"""Checks for installed packages and versions, and for available devices and precisions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.torch_version import TorchVersion

from headway.distributed.handler import check_choice

_OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: object, operation: str, requirement_version: str) -> bool:
    """Compare a version with a requirement, as in `compare_versions("numpy", ">=", "2.0")`.

    Args:
        library_or_version: the name of an installed distribution, or a `packaging` version.
        operation: `>`, `>=`, `==`, `!=`, `<=` or `<`.
        requirement_version: the version to compare with.

    Raises:
        UsageError: `operation` is invalid.
        importlib.metadata.PackageNotFoundError: the distribution is not installed.

    Examples:
        >>> from headway.utils import compare_versions
        >>> compare_versions("torch", ">=", "2.8")
        True
    """
    check_choice("compare_versions", _OPERATIONS, operation=operation)
    is_name = isinstance(library_or_version, str)
    found = version(str(library_or_version)) if is_name else str(library_or_version)
    return _OPERATIONS[operation](TorchVersion(found), requirement_version)


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version with `version`; see `compare_versions`.

    Examples:
        >>> from headway.utils import is_torch_version
        >>> is_torch_version(">=", "2.8")
        True
    """
    return compare_versions("torch", operation, version)


def _returns(what: str, value: Callable[..., bool]) -> Callable[..., bool]:
    """Return a function that calls `value` and whose docstring is "Return `what`."."""

    def is_so(*args: Any, **kwargs: Any) -> bool:
        return value(*args, **kwargs)

    is_so.__doc__ = f"Return {what}."
    return is_so


def _package(package: str, *distributions: str) -> Callable[..., bool]:
    """Return a function that checks whether one of `distributions` has installed `package`."""

    def is_installed(min_version: str | None = None) -> bool:
        # a mere folder, such as the `wandb` that wandb writes into, has no distribution
        found = [name for name in distributions or [package] if _has_version(name, min_version)]
        return bool(found) and find_spec(package) is not None

    what = f"whether the package `{package}` is installed in version `min_version` or later"
    return _returns(what, is_installed)


def _has_version(distribution: str, at_least: str | None) -> bool:
    try:
        return TorchVersion(version(distribution)) >= (at_least or "0")
    except PackageNotFoundError:
        return False


def _unsupported(what: str) -> Callable[..., bool]:
    return _returns(f"False, because Headway does not use {what}", lambda *_, **__: False)


is_cuda_available = _returns(
    "whether torch can use a CUDA or ROCm GPU", lambda: torch.cuda.is_available()
)
is_rocm_available = _returns(
    "whether torch can use a ROCm GPU",
    lambda: torch.version.hip is not None and torch.cuda.is_available(),
)
is_mps_available = _returns(
    "whether torch's version is at least `min_version`, and torch can use an Apple GPU",
    lambda min_version="1.12": (
        is_torch_version(">=", min_version) and torch.backends.mps.is_available()
    ),
)
is_xpu_available = _returns(
    "whether torch can use an Intel GPU; `check_device` has no effect",
    lambda check_device=False: torch.xpu.is_available(),
)
is_fp16_available = _returns(
    "whether fp16 is useful on the best available device, which is the case on GPUs only",
    lambda: is_cuda_available() or is_xpu_available() or is_mps_available(),
)
is_bf16_available = _returns(
    "whether the best available device supports bf16; `ignore_tpu` has no effect",
    lambda ignore_tpu=False: not torch.cuda.is_available() or torch.cuda.is_bf16_supported(),
)

_has_torchdata = _package("torchdata")
_has_tensorboard = _package("tensorboard")
_has_tensorboardx = _package("tensorboardX")
is_bnb_available = _package("bitsandbytes")
is_clearml_available = _package("clearml")
is_comet_ml_available = _package("comet_ml", "comet-ml")
is_datasets_available = _package("datasets")
is_mlflow_available = _package("mlflow", "mlflow", "mlflow-skinny")
is_peft_available = _package("peft")
is_schedulefree_available = _package("schedulefree")
is_torchao_available = _package("torchao")
is_trackio_available = _package("trackio")
is_transformers_available = _package("transformers")
is_wandb_available = _package("wandb")

is_tensorboard_available = _returns(
    "whether tensorboard or tensorboardX is installed",
    lambda: _has_tensorboard() or _has_tensorboardx(),
)
is_torchdata_stateful_dataloader_available = _returns(
    "whether torchdata has a StatefulDataLoader", lambda: _has_torchdata("0.8.0")
)

is_deepspeed_available = _unsupported("DeepSpeed")
is_fp8_available = _unsupported("fp8")
is_hpu_available = _unsupported("HPUs")
is_mlu_available = _unsupported("MLUs")
is_musa_available = _unsupported("MUSA devices")
is_neuron_available = _unsupported("Neuron devices")
is_npu_available = _unsupported("NPUs")
is_torch_xla_available = _unsupported("torch_xla")
is_transformer_engine_available = _unsupported("Transformer Engine")

if not TYPE_CHECKING:  # type checkers do not evaluate comprehensions
    __all__ = [name for name in dir() if name.startswith("is_") or name == "compare_versions"]
