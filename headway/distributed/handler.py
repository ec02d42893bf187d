"""Argument checks based on type annotations, and handlers that hold arguments for torch."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import fields
from enum import Enum
from functools import cache, partial, wraps
from inspect import isfunction, signature
from itertools import chain
from numbers import Real
from types import UnionType
from typing import IO, Any, ClassVar, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import torch

from headway.errors import Code, UsageError, WrongType
from headway.ipc.typed import shown, types_of

P = ParamSpec("P")
R = TypeVar("R")
Fits = Callable[[Any], bool]


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise WrongType for arguments that do not match their annotations."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            check_call(function, args, kwargs)
        return function(*args, **kwargs)

    return call


def checks(but: Collection[str] = ()) -> Callable[[type[R]], type[R]]:
    """Return a class decorator that applies `checked` to public methods, except those in `but`."""

    def decorate(kind: type[R]) -> type[R]:
        for name, method in [*vars(kind).items()]:
            is_public = name == "__init__" or not (name.startswith("_") or name in but)
            if is_public and isfunction(method):
                setattr(kind, name, checked(method))
        return kind

    return decorate


def check_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise WrongType if an argument of a function does not match its annotation."""
    names, hints = _parameters(function)
    for name, value in chain(zip(names, args, strict=False), kwargs.items()):
        if name in hints and not hints[name][1](value):
            raise _wrong_type(name, value, hints[name][0], function.__qualname__)


def check_entries(name: str, values: Sequence[Any], kind: type, called: str) -> None:
    """Raise WrongType if an element of an argument is not an instance of `kind`."""
    for wrong in [found for found in {*map(type, values)} if not issubclass(found, kind)]:
        value = next(value for value in values if type(value) is wrong)
        raise _wrong_type(name, value, kind, called)


def check_range(
    called: str, least: int, most: float = float("inf"), **arguments: float | None
) -> None:
    """Raise UsageError if an argument is neither None nor between `least` and `most`."""
    for name, value in arguments.items():
        if value is not None and not least <= value <= most:
            limits = f"of at least {least}" if most == float("inf") else f"from {least} to {most}"
            raise UsageError(
                f"invalid value {value!r} for {name}: must be a number {limits}",
                where=f"the script's {called}(...)",
                fix=f"pass {name}={min(max(least, 1), most)}, or another number {limits}",
                code=Code.BAD_ARGUMENT,
            )


def check_choice(called: str, choices: Collection[str], fix: str = "", **arguments: object) -> None:
    """Raise UsageError if an argument is not one of the choices."""
    for name, value in arguments.items():
        if value not in choices:
            raise UsageError(
                f"invalid value {value!r} for {name}: must be one of {', '.join(choices)}",
                where=f"the script's {called}(...)",
                fix=fix or f"pass one of them, such as {next(iter(choices))!r}",
                code=Code.BAD_ARGUMENT,
            )


def _wrong_type(name: str, value: object, hint: Any, called: str) -> WrongType:
    called = called.removesuffix(".__init__")
    shown_hint = hint.__name__ if isinstance(hint, type) else re.sub(r"\b[\w.]+\.", "", str(hint))
    kind, fix = f"of type {shown_hint}", f"pass a value of this type; see help({called})"
    if isinstance(value, str) and "PathLike" in shown_hint:  # an empty one
        kind, fix = "a path", "pass a path, such as '.' for the current folder, or omit it"
    return WrongType(
        f"{name} is {shown(value)}, not {kind}",
        where=f"the script's {called.rpartition('.')[2]}(...)",
        fix=fix,
        code=Code.WRONG_TYPE,
    )


@cache
def _parameters(function: Callable[..., Any]) -> tuple[list[str], dict[str, tuple[Any, Fits]]]:
    """Return the positional parameters, and the type and check of each named parameter."""
    found = signature(function).parameters.values()
    names = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {*names, *(p.name for p in found if p.kind is p.KEYWORD_ONLY)}
    hints: dict[str, Any] = {}
    with suppress(NameError):  # a script's class whose annotations refer to local names
        hints = types_of(function)
    return names, {name: (hints[name], _fits(hints[name])) for name in named & hints.keys()}


def _fits(hint: Any) -> Fits:
    """Return a function that checks whether a value matches a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda _: True
    if origin in (Union, UnionType):
        alternatives = [*map(_fits, inner)]
        # an empty path would be the current folder
        refused = [""] * any(get_origin(kind) is os.PathLike for kind in inner)
        return lambda value: any(fits(value) for fits in alternatives) and value not in refused
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in inner
    if hint in _NUMBERS:
        return lambda value: isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    if origin in _LISTS:
        return partial(_is_list, fits=None if origin is Iterable else _fits(inner[0]))
    if origin is IO:
        return lambda value: hasattr(value, "write")
    if isinstance(hint, TypeVar):
        return _fits(hint.__bound__)
    kind = Mapping if origin is dict else origin or hint
    return lambda value: isinstance(value, kind)


_NUMBERS: dict[Any, Any] = {int: int, float: (Real, torch.Tensor)}
_LISTS = (list, Sequence, Iterable)


def _is_list(value: Any, fits: Fits | None) -> bool:
    """Return whether `value` is a list of matching values; only one value per class is checked."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        return False
    if fits is None:
        return True
    return isinstance(value, Sized) and all(map(fits, {type(x): x for x in value}.values()))


class TextEnum(Enum):
    """An enumeration whose members are printed as their values."""

    def __str__(self) -> str:
        return str(self.value)


class KwargsHandler:
    """Base class of handlers, which hold torch's arguments; see `Accelerator(kwargs_handlers=...)`.

    Every handler is a dataclass whose fields all have defaults. Values of the wrong type raise
    UsageError.

    Examples:
        >>> from headway.utils import AutocastKwargs
        >>> AutocastKwargs(enabled=False).to_dict()
        {'enabled': False, 'cache_enabled': None}
        >>> AutocastKwargs(enabled=False).to_kwargs()
        {'enabled': False}
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        check_call(type(self).__init__, (), vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields."""
        return {field.name: copy.deepcopy(getattr(self, field.name)) for field in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return a copy of the fields that differ from their defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


def handlers_by_kind(
    handlers: Sequence[KwargsHandler] | None, kinds: Sequence[type[KwargsHandler]]
) -> dict[type[KwargsHandler], Any]:
    """Return an Accelerator's handler of each kind, by default one without changed fields."""
    found: dict[type[KwargsHandler], Any] = {}
    names = [kind.__name__ for kind in kinds]
    for handler in handlers or ():
        kind = next((kind for kind in kinds if isinstance(handler, kind)), type(handler))
        check_choice("Accelerator", names, kwargs_handlers=kind.__name__)
        if kind in found:
            raise UsageError(
                f"kwargs_handlers contains {kind.__name__} twice",
                where="the script's Accelerator(...)",
                fix="merge their values into a single handler",
                code=Code.CONTRADICTION,
            )
        found[kind] = handler
    return {kind: kind() for kind in kinds} | found
