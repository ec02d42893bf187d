"""What can be chosen is declared once; every other place derives it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from headway.devices.table import CPU, KINDS
from headway.ipc.choices import PRECISIONS, STRATEGIES
from headway.ipc.run_contract import DEVICES
from tests.architecture.tree import product_files

FILES = product_files()
ONCE = {
    "precisions": (set(PRECISIONS), "headway.ipc.choices"),
    "devices": (set(DEVICES), "headway.devices.table"),
    "strategies": (set(STRATEGIES), "headway.ipc.choices"),
}
OF_ONE_KIND = {"cuda": 8, "xpu": 8}
"""In how many files a kind of device may be named, outside those that are about it."""
MECHANISMS = {
    "lines on stderr that begin with our name": (r'"headway: ', 1),
    "typed readers": (r"get_type_hints\(|object_pairs_hook", 1),
    "handlers of signals": (r"\bsignal\.signal\(", 1),
}
"""What exists once: its sign in a file's text, and how many files may bear it."""
IMPLEMENTED = ("headway.precision.", "headway.strategies.")
"""The rooms that map each precision, and each strategy, to the class that implements it."""


@cache
def literals(path: Path) -> list[tuple[int, set[str]]]:
    """Return the line and the texts of each tuple, list, set and map that is written out."""
    found = []
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
        found.append((node.lineno, {text for text in texts if isinstance(text, str)}))
    return found


@pytest.mark.parametrize("kind", ONCE)
def test_no_second_list_is_written_out(kind: str) -> None:
    names, home = ONCE[kind]
    least = len(names) - 1  # a list that one name is missing from is a second list, too
    for module, path in FILES.items():
        if module == home or module.startswith(IMPLEMENTED):
            continue
        for line, texts in literals(path):
            assert len(texts & names) < least, f"{path}, line {line}: derive it from {home}"


@pytest.mark.parametrize("kind", OF_ONE_KIND)
def test_few_files_name_a_kind_of_device_and_all_others_ask_the_table(kind: str) -> None:
    naming = {
        module
        for module, path in FILES.items()
        if not module.startswith(("headway.devices.", "headway.estimate."))
        and f'"{kind}"' in path.read_text()
    }
    assert len(naming) <= OF_ONE_KIND[kind], sorted(naming)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_mechanism_exists_once(mechanism: str) -> None:
    sign, most = MECHANISMS[mechanism]
    found = [module for module, path in FILES.items() if re.search(sign, path.read_text())]
    assert 0 < len(found) <= most, found


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.stem for path in FILES.values())
    assert {name for name in names if names[name] > 1} == {"__init__", "accelerator", "table"}


def test_every_kind_of_device_is_one_class_and_one_row_of_the_table() -> None:
    for name, kind in KINDS.items():
        assert kind.name == name
        home = "kind" if kind is CPU else "table"  # the base is complete for a CPU
        assert type(kind).__module__ == f"headway.devices.{home}"


def test_every_precision_is_implemented() -> None:
    torch = pytest.importorskip("torch")
    from headway.precision.precision import CLASSES

    assert CLASSES.keys() == PRECISIONS.keys()
    for row in PRECISIONS.values():
        assert isinstance(getattr(torch, row.dtype), torch.dtype)
