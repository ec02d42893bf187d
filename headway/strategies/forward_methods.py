"""Methods of a shared model that use its weights, beside `forward()`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any


class ForwardMethods:
    """Makes methods of a model run as its `forward()` does, where ranks share its weights.

    Methods and `forward()` may call each other: the one that is called first does what is shared.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.is_in_method = self.is_in_forward = False
        model.register_forward_pre_hook(partial(self._note_forward, True), prepend=True)
        model.register_forward_hook(partial(self._note_forward, False), always_call=True)

    def register(self, name: str, plain: Callable[..., Any], shared: Callable[..., Any]) -> None:
        """Make `shared` the model's method of this name, or `plain` within another one."""
        setattr(self._model, name, _ForwardMethod(self, plain, shared))

    def _note_forward(self, is_running: bool, *_: Any) -> None:
        self.is_in_forward = is_running


class _ForwardMethod:
    def __init__(
        self, methods: ForwardMethods, plain: Callable[..., Any], shared: Callable[..., Any]
    ) -> None:
        update_wrapper(self, plain)
        self._methods, self._plain, self._shared = methods, plain, shared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        methods = self._methods
        if methods.is_in_forward or methods.is_in_method:
            return self._plain(*args, **kwargs)
        methods.is_in_method = True
        try:
            return self._shared(*args, **kwargs)
        finally:
            methods.is_in_method = False

    def __reduce__(self) -> Any:  # a copied or unpickled model has its own method
        return partial, (self._plain,)
