"""No test of the ordinary suite may wait for minutes: it ends by its own limit."""

from __future__ import annotations

import ast
import re

from tests.architecture.tree import ROOT

MOST_S = 300
LIMIT = re.compile(r"mark\.timeout\((\d+)\)")
LONG = re.compile(r"\bLONG\b|mark\.long\b")


def test_limits_above_five_minutes_are_of_long_forms() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        module = ast.parse(path.read_text())
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                marks = [ast.unparse(one) for one in node.decorator_list]
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                marks = [ast.unparse(node.value)]
            else:
                continue
            text = " ".join(marks)
            limits = [int(seconds) for seconds in LIMIT.findall(text)]
            assert max(limits, default=0) <= MOST_S or LONG.search(text), (
                f"{path}, line {node.lineno}"
            )
