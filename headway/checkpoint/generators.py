"""The states of all random number generators of this process."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's (if imported) and torch's generators.

    Args:
        device: whose generator is included, beside the CPU's.
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if device.type == "cuda":  # pragma: needs a GPU
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":  # pragma: needs a Mac
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Put the generators into states that `generator_states` returned.

    Those that are not among them, or of a library or device that is not in use here, stay.

    Raises:
        ValueError, TypeError, RuntimeError: a state is none.
    """
    torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":  # pragma: needs a GPU
        torch.cuda.set_rng_state(states["cuda"], device)
    if "mps" in states and device.type == "mps":  # pragma: needs a Mac
        torch.mps.set_rng_state(states["mps"])
