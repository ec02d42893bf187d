"""Finds calls of which all ranks take part, where a condition lets some ranks alone make them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_CONDITIONS = ("is_main_process", "is_local_main_process", "is_last_process")
_NUMBERS = ("process_index", "local_process_index")
_NEVER = ("DEEPSPEED", "MEGATRON_LM", "XLA")  # no run of Headway is of these types
_EXITS = ("sys.exit", "exit", "quit", "os._exit")
_WAITS = "not all ranks call it: an error, which names where the others are"
_SHARDS = "not all ranks call it: works alike; with fsdp an error"
_SAID = {
    "save_state": "not all ranks call it: rank 0 saves what all ranks share; with fsdp an error",
    **dict.fromkeys(("get_state_dict", "save_model"), _SHARDS),
    **dict.fromkeys(
        (
            *("load_state", "wait_for_everyone", "main_process_first", "local_main_process_first"),
            *("gather", "gather_for_metrics", "reduce", "pad_across_processes", "check_trigger"),
        ),
        _WAITS,
    ),
}


class AloneCall(NamedTuple):
    """A call of an Accelerator's method that not all ranks come to."""

    line: int
    method: str

    @property
    def said(self) -> str:
        """What becomes of it."""
        return _SAID[self.method]


def calls_alone(tree: ast.AST) -> list[AloneCall]:
    """Return such calls of what is named `accelerator`, by their form alone.

    Without those that the other ranks make, too, in a block of their own.
    """
    found = [*_calls(tree, None)]
    of_others = {call.method for call, are_named in found if not are_named}
    return [call for call, _ in found if call.method not in of_others]


def _calls(tree: ast.AST, are_named: bool | None) -> Iterator[tuple[AloneCall, bool]]:
    """Yield the calls that not all ranks make, each with whether it is a rank that is named.

    `are_named` says whether the ranks that run this are those that a condition names, or all
    others; None: all ranks, as far as is known.
    """
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute):
        method = tree.func.attr
        is_meant = method in _SAID and "accelerator" in ast.unparse(tree.func.value).lower()
        if is_meant and are_named is not None:
            yield AloneCall(tree.lineno, method), are_named
    for field, value in ast.iter_fields(tree):
        here = are_named
        if here is None and isinstance(tree, ast.If) and field != "test":
            here = _named(tree.test, field == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _calls(child, here)
            if here is None and isinstance(child, ast.If) and _leaves(child.body[-1]):
                here = _named(child.test, False)


def _named(test: ast.expr, outcome: bool) -> bool | None:
    """Return whether ranks for which a condition has this outcome are those that it names.

    Returns:
        False if they are the others; None if the condition does not say.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _named(test.operand, not outcome)
    if isinstance(test, ast.BoolOp):
        is_or = isinstance(test.op, ast.Or)
        named = [_named(one, outcome) for one in test.values if not (is_or and _is_never(one))]
        if is_or == outcome:  # one of them has this outcome, who knows which
            return named[0] if len({*named}) == 1 else None
        return next((one for one in named if one is not None), None)
    if isinstance(test, ast.Compare) and _name(test.left) in _NUMBERS:
        return outcome == isinstance(test.ops[0], ast.Eq)
    return outcome if _name(test) in _CONDITIONS else None


def _is_never(test: ast.expr) -> bool:
    """Return whether a condition is that the run is of a type that it never is."""
    return isinstance(test, ast.Compare) and _name(test.comparators[0]) in _NEVER


def _leaves(statement: ast.stmt) -> bool:
    """Return whether what follows a statement is not run."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func) in _EXITS
    return isinstance(statement, (ast.Return, ast.Continue, ast.Break, ast.Raise))


def _name(node: ast.expr) -> str:
    """Return the last part of a name; empty for anything else."""
    return str(getattr(node, "attr", getattr(node, "id", "")))
