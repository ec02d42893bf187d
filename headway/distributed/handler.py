"""Handlers: dataclasses that configure parts of torch, passed to `Accelerator`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from headway.errors import UsageError

_CALL = "the script's Accelerator(...)"


class KwargsHandler:
    """Keyword arguments for one part of torch; `Accelerator(kwargs_handlers=[...])` takes several.

    Every handler is a dataclass whose fields all have a default.

    Examples:
        >>> from headway.utils import AutocastKwargs
        >>> AutocastKwargs(enabled=False).to_dict()
        {'enabled': False, 'cache_enabled': None}
        >>> AutocastKwargs(enabled=False).to_kwargs()
        {'enabled': False}
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields."""
        return {one.name: copy.deepcopy(getattr(self, one.name)) for one in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return a copy of the fields that differ from their defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


Handler = TypeVar("Handler", bound=KwargsHandler)


class Handlers:
    """The handlers that one Accelerator got, at most one of each kind."""

    def __init__(
        self, handlers: Sequence[KwargsHandler] | None, kinds: Sequence[type[KwargsHandler]]
    ) -> None:
        self._by_kind: dict[type[KwargsHandler], KwargsHandler] = {}
        if isinstance(handlers, KwargsHandler):
            raise UsageError(
                f"kwargs_handlers is a {type(handlers).__name__}, not a list",
                where=_CALL,
                fix=f"pass kwargs_handlers=[{type(handlers).__name__}(...)]",
            )
        for handler in handlers or ():
            kind = next((one for one in kinds if isinstance(handler, one)), None)
            if kind is None:
                raise UsageError(
                    f"kwargs_handlers has a {type(handler).__name__}, which is no handler",
                    where=_CALL,
                    fix=f"pass objects of {', '.join(one.__name__ for one in kinds)}",
                )
            if kind in self._by_kind:
                raise UsageError(
                    f"kwargs_handlers has two {kind.__name__}",
                    where=_CALL,
                    fix="pass one of them, with the values of both",
                )
            self._by_kind[kind] = handler

    def of(self, kind: type[Handler]) -> Handler | None:
        found = self._by_kind.get(kind)
        return found if isinstance(found, kind) else None

    def or_default(self, kind: type[Handler]) -> Handler:
        return self.of(kind) or kind()
