"""The size of the product and of its tests only falls.

`python -m tests.architecture.test_size` records the lines of today; a change that removes some
commits the record. What a change adds, it removes elsewhere.
"""

from __future__ import annotations

import ast
import io
import json
import token
import tokenize
from pathlib import Path

from tests.architecture.tree import LINKS, ROOT, tracked_files

RECORD = Path(__file__).with_name("size.json")
PRODUCT = ("headway/", *(f"{link}/" for link in LINKS))
_LAYOUT = {
    token.NEWLINE,
    tokenize.NL,
    tokenize.COMMENT,
    token.INDENT,
    token.DEDENT,
    token.ENDMARKER,
}


def num_lines(path: Path) -> int:
    """Return the number of lines of a file of any kind: package data count, too."""
    return len(path.read_bytes().splitlines())


def num_code_lines(source: str) -> int:
    """Return the number of lines that hold code: no docstrings, comments or blank lines."""
    lines: set[int] = set()
    for found in tokenize.generate_tokens(io.StringIO(source).readline):
        if found.type not in _LAYOUT:
            lines.update(range(found.start[0], found.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if first is not None and ast.get_docstring(node, clean=False) is not None:
                lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def measure() -> dict[str, int]:
    """Return the lines of today: product, the code in it, the Python of tests, their data."""
    product = [ROOT / name for name in tracked_files() if name.startswith(PRODUCT)]
    product = [path for path in product if not path.is_symlink()]
    tests = [ROOT / name for name in tracked_files() if name.startswith("tests/")]
    tests = [path for path in tests if path != RECORD]
    code = [path.read_text() for path in product if path.suffix == ".py"]
    return {
        "product": sum(map(num_lines, product)),
        "product code": sum(map(num_code_lines, code)),
        "tests": sum(num_lines(path) for path in tests if path.suffix == ".py"),
        "test data": sum(num_lines(path) for path in tests if path.suffix != ".py"),
    }


SOURCE = '''
"""Module."""

# a comment
def f():
    """Summary.

    More.
    """
    return (
        1
    )  # why
'''


def test_lines_are_counted_without_docstrings_comments_and_blanks() -> None:
    assert num_code_lines(SOURCE) == 4


def test_the_size_is_what_is_recorded() -> None:
    today, recorded = measure(), json.loads(RECORD.read_text())
    grown = {name: today[name] - recorded[name] for name in today if today[name] > recorded[name]}
    assert not grown, f"lines added: {grown}; remove as many elsewhere"
    assert today == recorded, "fewer lines: record them by python -m tests.architecture.test_size"


if __name__ == "__main__":
    RECORD.write_text(json.dumps(measure(), indent=2) + "\n")
