"""Errors about names of Accelerate that Headway does not have, for `__getattr__` of its modules."""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import Any, NoReturn

from headway.errors import UsageError
from headway.migration.homes import module_with
from headway.migration.topics import Topic, topic_of_member, topic_of_name

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


class MissingAttributeError(UsageError, AttributeError):
    """Headway has no counterpart of a name of Accelerate; `hasattr` is False as usual."""


class MissingImportError(UsageError, ImportError):
    """A script imports a name of Accelerate that has no counterpart in Headway."""


def raise_missing(module: str, name: str, asked: str) -> NoReturn:
    """Raise the error about a name that a module of Headway does not have, in its `__getattr__`.

    `module` is Accelerate's of that purpose, below `accelerate`; `asked` is Headway's.

    Raises:
        MissingImportError: `from asked import name`, and Accelerate has such a name.
        MissingAttributeError: the same without an import statement.
        AttributeError: Accelerate has no such name, either.
    """
    topic = None if name.startswith("__") else topic_of_name(module, name)
    if _is_import(sys._getframe(2)):
        # Python replaces the text of an AttributeError here by its own
        found = module_with(name)
        where = f"from {asked} import {name}"
        if found is not None:
            raise MissingImportError(
                f"{name} is in {found}", where=where, fix=f"from {found} import {name}"
            )
        if topic is not None:
            raise MissingImportError(_said(name, topic), where=where, fix=topic.instead)
    elif topic is not None:
        raise MissingAttributeError(_said(name, topic), where=f"{asked}.{name}", fix=topic.instead)
    raise AttributeError(f"module {asked!r} has no attribute {name!r}")


def refuse_member(name: str, asked: object) -> None:
    """Raise the error about a member of Accelerate's that an object of Headway does not have.

    Returns without one where Accelerate has no such member, either.

    Raises:
        MissingAttributeError: with what to use instead.
    """
    topic = topic_of_member(name)
    if topic is not None:
        where = f"{type(asked).__name__}.{name}"
        raise MissingAttributeError(_said(name, topic), where=where, fix=topic.instead)


def refused_when_called(name: str, topic: Topic | None, asked: str) -> type:
    """Return what stands for a name of Accelerate's: a class without objects.

    Libraries import names that they may never use: `isinstance` of such a class is False. To call
    it, or to use an attribute, raises MissingAttributeError. `asked` is the name with its module.
    """
    instead = "" if topic is None else f"{topic.instead}; or "

    def refuse() -> NoReturn:
        raise MissingAttributeError(
            f"{name}, of Accelerate, has no counterpart in Headway"
            if topic is None
            else _said(name, topic),
            where=asked,
            fix=f"{instead}run the script without --replace-accelerate",
        )

    class Refusing(type):
        def __call__(cls, *_: object, **__: object) -> NoReturn:
            refuse()

        def __getattr__(cls, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            refuse()

    return Refusing(name, (), {"__module__": asked.rpartition(".")[0]})


def _said(name: str, topic: Topic) -> str:
    yet = " yet" if topic.is_planned else ""
    return f"{name}, for {topic.what}, has no counterpart in Headway{yet}"


def _is_import(frame: FrameType) -> bool:
    """Return whether the frame is executing the `import name` of a `from` statement."""
    return frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM
