"""Docstrings and messages use the terms of CONTRIBUTING's section on words.

Six patterns come back unless a test rejects them; the allowed phrases contain one and are right.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.tree import product_files

PATTERNS = {
    "set, enable, allow, restore; not let X do": r"lets?\b(?!')",
    "a noun; not a relative clause": r"(?:what|that) is (?:said|told|known|asked) (?:of|about)",
    "resume, continue; not go on": r"(?:go|goes|going|gone|went) on\b(?! the | a )",
    "log, print, report, send, notify; not say, tell": r"(?:tells?|told|says?|said)\b",
    "the thing's name; not anew, as ever, of its own": r"(?:anew|as ever|of (?:its|their) own)\b",
    "is not a; not is no": r"(?<!there )(?:is|are) (?:no (?!longer|more)|none\b)",
    "until, during, so, except; not till, amid, thus, but for": r"(?:till|amid|thus|but for)\b",
}
ALLOWED: tuple[str, ...] = ()


def texts(code: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield docstrings and the strings that hold several words, with their lines."""
    for node in ast.walk(code):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, " ".join(node.value.split())


def unusual(text: str) -> list[str]:
    """Return the advice for each pattern in a text."""
    for phrase in ALLOWED:
        text = text.replace(phrase, "")
    text = text.replace("None", "null").lower()
    return [advice for advice, pattern in PATTERNS.items() if re.search(rf"\b{pattern}", text)]


def test_docstrings_and_messages_use_the_terms_of_the_field() -> None:
    found = [
        f"{path}:{line}: {advice}: {text[:100]}"
        for path in product_files().values()
        for line, text in texts(ast.parse(path.read_text()))
        for advice in unusual(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "Let signals do what they did before",
        "refuses what is said of a machine",
        "the run goes on without it",
        "the launcher is told the step",
        "a list of its own",
        "job 17 is no job of this user",
        "a stop amid an import",
    ],
)
def test_each_pattern_is_found(text: str) -> None:
    assert unusual(text)
    assert not unusual("there is no file; the loader is no longer used; it went on the queue")
