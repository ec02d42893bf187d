"""What a sharded model does while its weights are gathered: other methods than forward(), and
`state_dict()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch.distributed.fsdp import register_fsdp_forward_method

Module = torch.nn.Module


class ForwardMethods:
    """Lets methods of a model gather its weights, from their beginning to their end.

    Methods and `forward()` may call each other: whichever is called first gathers, and frees.
    torch's own wrapper would free them after each, though the caller needs them still.

    Args:
        model: a sharded model.
        before: is called before weights are gathered for a method.
    """

    def __init__(self, model: Any, before: Callable[[], None]) -> None:
        self._model = model
        self._before = before
        self._is_in_forward = self._is_in_method = False
        model.register_forward_pre_hook(partial(self._note_forward, True), prepend=True)
        model.register_forward_hook(partial(self._note_forward, False), always_call=True)

    def register(self, name: str) -> None:
        """Let the method of this name be called like `forward()`."""
        plain = getattr(self._model, name)
        register_fsdp_forward_method(self._model, name)
        gathering = getattr(self._model, name)

        @wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_forward or self._is_in_method:
                return plain(*args, **kwargs)
            self._before()
            with self._gathered_to_the_end():
                return gathering(*args, **kwargs)

        setattr(self._model, name, call)

    @contextmanager
    def _gathered_to_the_end(self) -> Iterator[None]:
        """Let `forward()` free no weights that are gathered for a method that calls it."""
        self._is_in_method = True
        self._model.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            self._is_in_method = False
            self._model.set_reshard_after_forward(True, recurse=False)
            self._model.reshard()

    def _note_forward(self, is_running: bool, *_: Any) -> None:
        self._is_in_forward = is_running


@contextmanager
def whole_state_dicts(model: Module) -> Iterator[None]:
    """Let `state_dict()` of gathered modules return copies of their whole weights.

    Relies on `_state_dict_pre_hooks`, in which torch's FSDP has a hook that would shard the weights
    before, and would do so on the ranks alone that call `state_dict()`.
    """
    modules = [*model.modules()]
    sharding = [
        {number: hook for number, hook in one._state_dict_pre_hooks.items() if _is_of_fsdp(hook)}
        for one in modules
    ]
    copying = [
        one.register_state_dict_post_hook(_copy_parameters)  # type: ignore[no-untyped-call]
        for one in modules
    ]
    for module, hooks in zip(modules, sharding, strict=True):
        for number in hooks:
            del module._state_dict_pre_hooks[number]
    try:
        yield
    finally:
        for module, hooks in zip(modules, sharding, strict=True):
            module._state_dict_pre_hooks.update(hooks)
        for handle in copying:
            handle.remove()


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _copy_parameters(module: Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Copy what torch frees at the end of the context."""
    for name in module._parameters:
        if f"{prefix}{name}" in state:
            state[f"{prefix}{name}"] = state[f"{prefix}{name}"].clone()
