"""Each error has the id of its cause, and each id has a page in errors.md.

surface.txt lists the ids: an id that is removed or reused is a visible diff.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from headway.commands.explain import read_pages
from headway.errors import Code, HeadwayError
from tests.architecture.tree import product_files

CODES = {name: value for name, value in vars(Code).items() if name[0] != "_"}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Yield the syntax nodes of all modules but errors.py, with the name of the module."""
    for module, path in product_files().items():
        if module != "headway.errors":
            yield from ((module, node) for node in ast.walk(ast.parse(path.read_text())))


def test_each_id_has_one_name_and_one_page_in_order() -> None:
    assert list(CODES.values()) == sorted(set(CODES.values())) == list(read_pages())


def test_each_code_is_the_cause_of_an_error_of_the_product() -> None:
    used = {
        node.attr
        for _, node in nodes()
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Code"
    }
    assert used == set(CODES)


def test_only_the_failure_of_a_script_has_no_id() -> None:
    without = [
        module
        for module, node in nodes()
        if isinstance(node, ast.keyword) and (node.arg, ast.unparse(node.value)) == ("code", "None")
    ]
    assert without == []


def test_the_first_line_of_an_error_ends_with_its_id() -> None:
    error = HeadwayError("a", where="c", fix="d", code=Code.BAD_VALUE, details="b")
    assert str(error) == "a [HW002]\n  b\n  from: c\n  fix:  d"
