"""Seeds, synchronizes, saves and restores random number generators."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from headway.devices.table import KINDS, kind_of
from headway.distributed.collectives import broadcast_object_list
from headway.distributed.handler import TextEnum, check_choice, check_range, checked
from headway.distributed.world import rank_and_size, rank_and_size_without_group
from headway.errors import Code, UsageError
from headway.ipc.progress import process_progress


class RNGType(str, TextEnum):
    """A kind of random number generator; each member is equal to its string value.

    Examples:
        >>> from headway.utils import RNGType
        >>> RNGType("torch") == "torch"
        True
    """

    TORCH = "torch"  # of the CPU
    CUDA = "cuda"  # of the current GPU
    XPU = "xpu"
    GENERATOR = "generator"  # the script's torch.Generator


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Broadcast rank 0's random number generator states to all ranks; a collective call.

    Args:
        rng_types: `torch`, `cuda`, `xpu`, `generator`, or members of `RNGType`.
        generator: the generator to synchronize if `rng_types` contains `generator`.

    Raises:
        UsageError: a type is invalid, or the type is `generator` but no generator is passed.

    Examples:
        >>> import torch
        >>> from headway import synchronize_rng_states
        >>> synchronize_rng_states(["torch", "generator"], generator=torch.Generator())
    """
    for rng_type in map(_type_of, rng_types):
        if rng_type is RNGType.GENERATOR:
            if generator is None:
                raise UsageError(
                    "rng_type is 'generator', but no generator was passed",
                    where="the script's synchronize_rng_states(...)",
                    fix="pass generator=..., or use rng_type 'torch'",
                    code=Code.BAD_ARGUMENT,
                )
            generator.set_state(broadcast_object_list([generator.get_state()])[0])
        elif rng_type is RNGType.TORCH:
            torch.set_rng_state(broadcast_object_list([torch.get_rng_state()])[0])
        elif rank_and_size()[1] > 1:  # pragma: needs a GPU
            kind = kind_of(rng_type.value)
            kind.set_rng_state(broadcast_object_list([kind.rng_state()])[0])


def agreed_types(rng_types: Iterable[str | RNGType] | None) -> list[RNGType]:
    """Convert `rng_types` to members of `RNGType`; None selects only the samplers' generators."""
    types = [RNGType.GENERATOR] if rng_types is None else [_type_of(kind) for kind in rng_types]
    for device in (kind.value for kind in types if kind.value in KINDS):
        if not kind_of(device).is_available():
            raise UsageError(
                f"rng_types contains {device!r}, but torch finds no GPU",
                where="the script's Accelerator(rng_types=...)",
                fix="omit it",
                code=Code.NO_GPU,
            )
    return types


def _type_of(name: str | RNGType) -> RNGType:
    check_choice("synchronize_rng_states", [*RNGType], "omit it", rng_type=name)
    return RNGType(name)


@checked
def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, numpy and torch on all devices.

    Every rank gets the same seed, so that models start with equal weights. The ranks then also draw
    the same random augmentations for their different samples, and the same dropout masks.

    Args:
        seed: an integer from 0 to 2**32 - 1.
        device_specific: add the rank to the seed, so that each rank draws different numbers.
        deterministic: call `torch.use_deterministic_algorithms(True)`.

    Examples:
        >>> import torch
        >>> from headway.utils import set_seed
        >>> set_seed(0)
        >>> first = torch.rand(2)
        >>> set_seed(0)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    check_range("set_seed", 0, 2**32 - 1, seed=seed)
    process_progress().has_own_seed = device_specific
    if device_specific:
        seed += rank_and_size_without_group()[0]
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's and numpy's generators, and of torch's for CPU and `device`."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    own = kind_of(device.type).rng_state(device)
    if own is not None:  # pragma: needs a GPU
        states[device.type] = own
    return states


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore states returned by `generator_states`.

    A device without a saved state keeps its generator's state. An invalid state raises ValueError,
    TypeError or RuntimeError.
    """
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if device.type in states:  # pragma: needs a GPU
        kind_of(device.type).set_rng_state(states[device.type], device)


def are_generator_states(states: Any) -> bool:
    """Return whether `set_generator_states` would accept these states, without setting them.

    numpy does not check that the position is within its 624 numbers, so an invalid position would
    cause an out-of-bounds read.
    """
    try:
        torch.Generator().set_state(states["torch"])
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        return bool(0 <= states["numpy"][2] <= len(states["numpy"][1]))
    except Exception:  # noqa: BLE001  libraries raise various errors for invalid states
        return False
