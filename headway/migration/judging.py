"""Says of each thing that a script takes from Accelerate whether the installed Headway has it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from headway.migration.homes import COMPAT, NATIVE, compat_module, joined, module_exists, offered
from headway.migration.reading import ACCELERATOR, STATES, Kind, Need, Script, inside
from headway.migration.topics import Topic, topic_of_member, topic_of_module, topic_of_name


class Status(Enum):
    """What becomes of it."""

    ALIKE = "works alike"
    DIFFERS = "differs"
    REFUSED = "refused"
    PLANNED = "not there yet"
    MISSING = "not there"

    @property
    def is_there(self) -> bool:
        return self in (Status.ALIKE, Status.DIFFERS)


class Verdict(NamedTuple):
    """What becomes of one thing."""

    status: Status
    said: str = ""  # how it differs, or that it is missing
    instead: str = ""  # why it differs, or what to use instead


class Difference(NamedTuple):
    """How a call with `headway.Accelerator` differs from Accelerate's, for the same script."""

    how: str  # what a script sees
    why: str  # the reason, or what to do
    is_in_compat: bool = False  # `headway.compat` differs in this, too


_CLIP = Difference(
    "gradients are left alone while they accumulate; in Accelerate each partial sum is clipped",
    "the norm of a partial sum is not the gradient's",
)

_HALVES = Difference(
    "each batch size that is tried is half of the last one; in Accelerate nine tenths of it",
    "a size that fits is found in fewer attempts",
)

DIFFERENCES = {
    "Accelerator.prepare(scheduler)": Difference(
        "the schedule steps once for each optimizer step; in Accelerate once for each rank",
        "give its length in optimizer steps: by len(loader) after prepare, without a factor"
        " num_processes; or adopt with --compat",
    ),
    "Accelerator.prepare(loader)": Difference(
        "a last round that is not whole is shared out evenly; in Accelerate filled with repeats",
        "fewer samples count twice in the last step of an epoch",
    ),
    "Accelerator.join_uneven_inputs": Difference(
        "ranks on CPUs join, too; Accelerate ignores it there, with a warning",
        "a script does the same on every device",
        is_in_compat=True,
    ),
    "Accelerator.reduce": Difference(
        "reduction='none' leaves each rank its own values, in Accelerate it adds up; scale is"
        " applied, in Accelerate on TPUs alone",
        "the arguments mean what they say",
    ),
    "accelerate.find_executable_batch_size": _HALVES,
    "accelerate.utils.find_executable_batch_size": _HALVES,
    "Accelerator.load_state": Difference(
        "a loader goes on in the epoch that it was in; in Accelerate it begins the epoch anew",
        "remove code that skips batches, other than skip_first_batches()",
    ),
    "Accelerator.clip_grad_norm_": _CLIP,
    "Accelerator.clip_grad_value_": _CLIP,
}
"""By the text of a `Need`."""


def verdicts(script: Script, *, compat: bool = False) -> dict[Need, Verdict]:
    """Judge all that a script takes; with `compat` it imports from `headway.compat` alone."""
    package = COMPAT if compat or _takes_accelerator_from_compat(script) else NATIVE
    return {need: judge(need, package) for need in script.needs}


@cache
def judge(need: Need, package: str) -> Verdict:
    """Judge one thing; `package` is where the script's Accelerator comes from."""
    judged = {
        Kind.MODULE: _module,
        Kind.NAME: _name,
        Kind.MEMBER: _member,
        Kind.ARGUMENT: _argument,
        Kind.PASSED: _there,
    }[need.kind](need)
    difference = DIFFERENCES.get(str(need))
    if difference is None or not judged.status.is_there:
        return judged
    if package == COMPAT and not difference.is_in_compat:
        return judged
    return Verdict(Status.DIFFERS, difference.how, difference.why)


def module_for(module: str, names: list[str], *, compat: bool = False) -> str:
    """Return the module of Headway to import names of a module of Accelerate's from.

    They are all that one statement imports; those that Headway has nowhere do not matter. With
    `compat` it is one of `headway.compat`.
    """
    native, like_original = joined(NATIVE, module), compat_module(module)
    missing = [name for name in names if not _has(native, name)]
    if compat or len(missing) == len(names) or any(_has(like_original, name) for name in missing):
        return like_original
    return native


def _takes_accelerator_from_compat(script: Script) -> bool:
    """Return whether a script's own Accelerator will be that of `headway.compat`.

    It is where it is used as `accelerate.Accelerator`, or imported along with names that only
    `headway.compat` has.
    """
    imported = [
        module_for(inside(node.module or ""), [alias.name for alias in node.names])
        for node in script.imports
        if isinstance(node, ast.ImportFrom)
        if any(alias.name == ACCELERATOR for alias in node.names)
    ]
    if imported:
        return any(module.startswith(COMPAT) for module in imported)
    return any(need.kind is Kind.NAME and need.name == ACCELERATOR for need in script.needs)


def _there(_: Need) -> Verdict:
    return Verdict(Status.ALIKE)


def _module(need: Need) -> Verdict:
    if module_exists(joined(COMPAT, need.owner)) and topic_of_module(need.owner) is None:
        return Verdict(Status.ALIKE)
    return _missing(topic_of_module(need.owner))


def _name(need: Need) -> Verdict:
    if _has(module_for(need.owner, [need.name]), need.name):
        return Verdict(Status.ALIKE)
    return _missing(topic_of_name(need.owner, need.name))


def _member(need: Need) -> Verdict:
    if need.name in _members(need.owner):
        return Verdict(Status.ALIKE)
    return _missing(topic_of_member(need.name))


def _argument(need: Need) -> Verdict:
    function = _found(need.owner)
    if function is None:  # the name itself is missing, and is said to be
        return Verdict(Status.ALIKE)
    accepted = inspect.signature(function).parameters.values()
    if any(one.name == need.name for one in accepted):
        return Verdict(Status.ALIKE)
    if need.owner == ACCELERATOR:
        from headway.training.arguments import UNSUPPORTED  # imports torch

        judged = _missing(topic_of_member(need.name))
        instead = UNSUPPORTED.get(need.name, judged.instead)
        status = Status.PLANNED if judged.status is Status.PLANNED else Status.REFUSED
        return Verdict(status, judged.said, instead)
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted):
        return Verdict(Status.ALIKE)
    return _missing(topic_of_member(need.name))


def _missing(topic: Topic | None) -> Verdict:
    if topic is None:
        return Verdict(Status.MISSING, "no counterpart in Headway", "remove it")
    status = Status.PLANNED if topic.is_planned else Status.REFUSED
    return Verdict(status, f"for {topic.what}", topic.instead)


def _has(module: str, name: str) -> bool:
    """Return whether a module of Headway has a name for scripts."""
    if not module_exists(module):
        return False
    if module.startswith(COMPAT):
        return hasattr(import_module(module), name)
    return name in offered(module)


def _found(called: str) -> Any:
    """Return what is called: `utils.set_seed`, `Accelerator.prepare`; None if it is missing."""
    owner, _, name = called.rpartition(".")
    if owner in (ACCELERATOR, *STATES):
        return getattr(_class(owner), name, None)
    if called == ACCELERATOR:
        return _class(ACCELERATOR)
    module = module_for(owner, [name])
    return getattr(import_module(module), name) if _has(module, name) else None


def _class(name: str) -> type[Any] | None:
    module = joined(COMPAT, "" if name == ACCELERATOR else "state")
    found: type[Any] | None = getattr(import_module(module), name, None)
    return found


@cache
def _members(owner: str) -> frozenset[str]:
    """Return the members of a class and its objects; AcceleratorState shares PartialState's."""
    classes = [_class(name) for name in {owner, *(STATES[:2] if owner in STATES[:2] else ())}]
    bases = [base for one in classes if one is not None for base in one.__mro__[:-1]]
    return frozenset(
        name
        for base in bases
        for name in {*vars(base), *inspect.get_annotations(base), *_set_on_self(base)}
    )


def _set_on_self(base: type[Any]) -> set[str]:
    """Return the attributes that the methods of a class give its objects."""
    try:
        source = textwrap.dedent(inspect.getsource(base))
    except (OSError, TypeError):  # a class without source
        return set()
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
