"""Activation checkpointing: blocks compute their activations a second time in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(blocks: Iterable[torch.nn.Module]) -> None:
    """Let each block keep only its inputs until the backward pass; names of weights stay."""
    for block in blocks:
        if not isinstance(block.forward, _CheckpointedForward):
            block.forward = _CheckpointedForward(block.forward)


class _CheckpointedForward:
    """A block's forward under `torch.utils.checkpoint`, where gradients are wanted.

    An object and no closure, so that a copied or unpickled block calls its own forward.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.__wrapped__ = forward  # what inspect.signature() looks at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        return checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs)
