"""What the product takes from torch that is private: a new or old torch may lack it."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest

from tests.architecture.tree import product_files

torch = pytest.importorskip("torch")
PRIVATE = re.compile(r"torch(\.\w+)*\.(_[a-z]\w*|_C\.\w+)(\.\w+)*")


def is_there(name: str) -> bool:
    owner: Any = torch
    for end in re.finditer(r"(?<=\.)(\w+)", name):
        with suppress(ImportError):
            import_module(name[: end.end()])
        owner = getattr(owner, end[1], None)
    return owner is not None


def test_every_private_name_of_torch_that_is_used_is_there() -> None:
    names: set[str] = set()
    for path in product_files().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{one.name}" for one in node.names}
            elif isinstance(node, ast.Attribute):
                names.add(ast.unparse(node))
    private = sorted(filter(PRIVATE.fullmatch, names))
    assert "torch.distributed.utils._sync_module_states" in private
    assert [name for name in private if not is_there(name)] == []
