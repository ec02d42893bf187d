"""Finds calls of which all ranks take part, where a condition lets some ranks alone make them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_CONDITIONS = ("is_main_process", "is_local_main_process", "is_last_process")
_WAITS = "not all ranks call it: an error, which names where the others are"
_SAID = {
    "save_state": "not all ranks call it: rank 0 saves what all ranks share; with fsdp an error",
    **dict.fromkeys(
        (
            *("load_state", "wait_for_everyone", "main_process_first", "local_main_process_first"),
            *("gather", "gather_for_metrics", "reduce", "pad_across_processes", "check_trigger"),
        ),
        _WAITS,
    ),
}


class AloneCall(NamedTuple):
    """A call of an Accelerator's method in a block that not all ranks run."""

    line: int
    method: str

    @property
    def said(self) -> str:
        """What becomes of it."""
        return _SAID[self.method]


def calls_alone(tree: ast.AST, is_alone: bool = False) -> Iterator[AloneCall]:
    """Yield such calls of what is named `accelerator`, by their form alone."""
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute) and is_alone:
        method = tree.func.attr
        if method in _SAID and "accelerator" in ast.unparse(tree.func.value).lower():
            yield AloneCall(tree.lineno, method)
    body = tree.body if isinstance(tree, ast.If) and _is_for_some(tree.test) else ()
    for child in ast.iter_child_nodes(tree):
        yield from calls_alone(child, is_alone or child in body)


def _is_for_some(test: ast.expr) -> bool:
    """Return whether a condition holds on ranks that it names, and on these only."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_for_some, test.values))
    return isinstance(test, ast.Attribute) and test.attr in _CONDITIONS
