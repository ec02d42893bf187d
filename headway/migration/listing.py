"""Lists what a script takes from Accelerate, with every difference that the table has for it."""

from __future__ import annotations

import ast
from importlib import import_module
from inspect import signature
from typing import NamedTuple

from headway.migration.homes import COMPAT, has, is_module, module_for
from headway.migration.scripts import ACCELERATOR, Lines, Script, inside, shown
from headway.migration.topics import Topic, topic_of_member, topic_of_module, topic_of_name

MISSING, DIFFERS, SAME = "missing", "differs", "same"
"""Whether Headway has a name, in the order of rows."""


class Row(NamedTuple):
    name: str
    lines: Lines
    status: str
    what: str = ""  # how it differs, or what it is for
    instead: str = ""  # why it differs, or what to use


class Difference(NamedTuple):
    name: str
    how: str  # what a script sees
    why: str  # the reason, or what to do


_CLIP = (
    "gradients are left alone while they accumulate; Accelerate clips each partial sum",
    "the norm of a partial sum is not the gradient's",
)
_HALVES = (
    "each batch size that is tried is half of the last one; in Accelerate nine tenths of it",
    "a size that fits is found in fewer attempts",
)

_DISPATCHED = (
    "with dispatch_batches=True samples are divided and each rank collates its own; Accelerate"
    " collates on rank 0 and cuts the batches",
    "batches of any shape can be dispatched",
)

DIFFERENCES = (
    Difference(
        "Accelerator.prepare",
        "a schedule steps once for each optimizer step; in Accelerate once for each rank",
        "give its length in optimizer steps: by len(loader) after prepare, without a factor"
        " num_processes; or adopt with --compat",
    ),
    Difference(
        "Accelerator.prepare",
        "the samples of an incomplete last round are divided among the ranks; Accelerate fills the"
        " round with repeats",
        "fewer samples count twice in the last step of an epoch",
    ),
    Difference(
        "Accelerator.reduce",
        "reduction='none' leaves each rank its own values, in Accelerate it adds up; scale is"
        " applied, in Accelerate on TPUs alone",
        "the arguments mean what they say",
    ),
    Difference("accelerate.find_executable_batch_size", *_HALVES),
    Difference("accelerate.utils.find_executable_batch_size", *_HALVES),
    Difference(
        "Accelerator.load_state",
        "a loader resumes in the middle of its epoch; in Accelerate it starts the epoch again",
        "remove code that skips batches, other than skip_first_batches()",
    ),
    Difference(
        "Accelerator.prepare",
        "every rank reads all of a stream and keeps its share; in Accelerate rank 0 alone reads it",
        "pass DataLoaderConfiguration(dispatch_batches=True) if rank 0 should read for all",
    ),
    Difference(
        "Accelerator.prepare",
        "a schedule whose optimizer is not prepared is refused; in Accelerate it follows all"
        " prepared optimizers",
        "prepare the optimizer of each schedule",
    ),
    Difference(
        "Accelerator(split_batches=)",
        "each batch is divided among the ranks; in Accelerate the argument has no effect",
        "remove it to keep the size of each rank's batches",
    ),
    *(
        Difference(f"accelerate.{name}", *_DISPATCHED)
        for name in ("DataLoaderConfiguration", "utils.DataLoaderConfiguration")
    ),
    Difference("Accelerator.clip_grad_norm_", *_CLIP),
    Difference("Accelerator.clip_grad_value_", *_CLIP),
)


def rows_of(script: Script, *, compat: bool = False) -> list[Row]:
    """List the names of a script: what is missing, what differs, what is the same.

    Every difference of a name is listed, whether it applies to the script or not; none if all
    imports become those of `headway.compat`, as with `compat`. The Accelerator's members are found
    by name, on any object.
    """
    only_compat = compat or all(map(_becomes_compat, script.imports))
    rows = []
    for row in (*_names(script), *_members(script)):
        known = () if only_compat or row.status == MISSING else DIFFERENCES
        found = [one for one in known if one.name == row.name]
        rows += [Row(row.name, row.lines, DIFFERS, one.how, one.why) for one in found] or [row]
    order = [MISSING, DIFFERS, SAME]
    return sorted(rows, key=lambda row: (order.index(row.status), row.lines))


def _becomes_compat(statement: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(statement, ast.Import):
        return True
    names = [alias.name for alias in statement.names]
    return module_for(inside(statement.module or ""), names).startswith(COMPAT)


def _names(script: Script) -> list[Row]:
    rows = []
    for (module, name), lines in script.names.items():
        if name:
            is_there, topic = has(module_for(module, [name]), name), topic_of_name(module, name)
        else:
            topic = topic_of_module(module)
            is_there = topic is None and is_module(module)
        rows.append(_row(shown(module, name), lines, is_there, topic))
    return rows


def _members(script: Script) -> list[Row]:
    from headway.training.arguments import UNSUPPORTED  # imports torch

    accepted = signature(getattr(import_module(COMPAT), ACCELERATOR)).parameters
    differ = {one.name for one in DIFFERENCES}
    rows = []
    for name, lines in script.attributes.items():
        member, topic = f"{ACCELERATOR}.{name}", topic_of_member(name)
        if topic is not None or member in differ:
            rows.append(_row(member, lines, topic is None, topic))
    for name, lines in script.keywords.items():
        row = _row(f"{ACCELERATOR}({name}=)", lines, name in accepted, topic_of_member(name))
        if row.status == MISSING:
            row = row._replace(instead=UNSUPPORTED.get(name, row.instead))
        rows.append(row)
    return rows


def _row(name: str, lines: Lines, is_there: bool, topic: Topic | None) -> Row:
    if is_there:
        return Row(name, lines, SAME)
    if topic is None:
        return Row(name, lines, MISSING, "no counterpart in Headway", "remove it")
    return Row(name, lines, MISSING, f"for {topic.what}", topic.instead)
