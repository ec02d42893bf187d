"""What can be chosen is declared once; every other place derives it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.contract.precisions import PRECISIONS
from headway.contract.run import DEVICES
from tests.architecture.tree import product_files

ONCE = {
    "precisions": (set(PRECISIONS), "headway.contract.precisions"),
    "devices": (set(DEVICES), "headway.contract.run"),
}
IMPLEMENTED = "headway.precision"
"""The room that maps each precision to the class that implements it."""


def literals(path: Path) -> Iterator[tuple[int, set[str]]]:
    """Yield the line and the texts of each tuple, list, set and map that is written out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            parts: list[ast.expr | None] = [*node.elts]
        elif isinstance(node, ast.Dict):
            parts = [*node.keys]
        elif isinstance(node, ast.Call):
            parts = [*node.args]
        else:
            continue
        texts = [part.value for part in parts if isinstance(part, ast.Constant)]
        yield node.lineno, {text for text in texts if isinstance(text, str)}


@pytest.mark.parametrize("kind", ONCE)
def test_no_second_list_is_written_out(kind: str) -> None:
    names, home = ONCE[kind]
    least = len(names) - 1  # a list that one name is missing from is a second list, too
    for module, path in product_files().items():
        if module == home or module.startswith(f"{IMPLEMENTED}."):
            continue
        for line, texts in literals(path):
            assert len(texts & names) < least, f"{path}, line {line}: derive it from {home}"


def test_every_precision_is_implemented() -> None:
    torch = pytest.importorskip("torch")
    from headway.precision.choice import PRECISIONS as CLASSES

    assert CLASSES.keys() == PRECISIONS.keys()
    for row in PRECISIONS.values():
        assert isinstance(getattr(torch, row.dtype), torch.dtype)
