"""Names of `accelerate.test_utils.testing`: what tests of training scripts check and skip with."""

from __future__ import annotations

import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from headway.compat.forwarding import forward
from headway.distributed.collectives import gather
from headway.distributed.environment import parse_flag_from_env

__getattr__, __dir__ = forward(__name__)

Case = TypeVar("Case", bound="Callable[..., Any]")


def _best_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


torch_device = _best_device()
"""The type of the device that tests run on, such as `cuda` or `cpu`."""

device_count = 1 if torch_device == "cpu" else torch.accelerator.device_count()
"""How many of them this machine has; one where it is the CPU."""


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return whether all ranks have the same tensor; every rank has to call this."""
    every = gather(tensor[None])
    return bool((every == every[:1]).all())


@contextmanager
def assert_exception(exception_class: type[Exception], msg: str | None = None) -> Iterator[None]:
    """Fail unless the block raises `exception_class`, with `msg` in its text; pass others on."""
    raised: BaseException | None = None
    try:
        yield
    except exception_class as error:
        raised = error
    assert raised is not None, f"nothing raised {exception_class.__name__}"
    assert msg is None or msg in str(raised), f"{raised!r} does not say {msg!r}"


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return the words of `headway launch` with flags: `num_processes=2`, `cpu=True`."""
    words = [sys.executable, "-m", "headway", "launch"]
    for name, value in kwargs.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [] if value is None else [f"{flag}={value}"]
    return words


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count)
"""Starts a rank on each device of this machine; the script and its arguments follow."""


def execute_subprocess_async(
    cmd: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it printed.

    Raises:
        RuntimeError: it failed; with its standard error.
        subprocess.TimeoutExpired: after `timeout` seconds.
    """
    done = subprocess.run(
        [*cmd], env=env, timeout=timeout, check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(cmd)} exited with {done.returncode}:\n{done.stderr}")
    return done


def slow(test_case: Case) -> Case:
    """Skip a test unless the variable RUN_SLOW is set."""
    return _only_if(parse_flag_from_env("RUN_SLOW"), "RUN_SLOW is not set")(test_case)


def require_cpu(test_case: Case) -> Case:
    """Skip a test where there is a GPU."""
    return _only_if(torch_device == "cpu", "this machine has a GPU")(test_case)


def require_non_cpu(test_case: Case) -> Case:
    """Skip a test where there is no GPU."""
    return _only_if(torch_device != "cpu", "this machine has no GPU")(test_case)


def require_cuda(test_case: Case) -> Case:
    """Skip a test where there is no GPU that CUDA or ROCm knows."""
    return _only_if(torch.cuda.is_available(), "this machine has no CUDA")(test_case)


def require_mps(test_case: Case) -> Case:
    """Skip a test that is not on a Mac with MPS."""
    return _only_if(torch_device == "mps", "this machine has no MPS")(test_case)


def require_single_device(test_case: Case) -> Case:
    """Skip a test unless this machine has exactly one GPU."""
    is_one = torch_device != "cpu" and device_count == 1
    return _only_if(is_one, "this machine does not have one GPU")(test_case)


def require_multi_device(test_case: Case) -> Case:
    """Skip a test where there are not several GPUs."""
    return _only_if(device_count > 1, "this machine does not have several GPUs")(test_case)


require_single_gpu, require_multi_gpu = require_single_device, require_multi_device


def _only_if(holds: bool, otherwise: str) -> Callable[[Case], Case]:
    return unittest.skipUnless(holds, otherwise)
