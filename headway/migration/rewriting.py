"""Changes the imports of a script from Accelerate to Headway, and nothing else in its text."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import accumulate, takewhile
from typing import NamedTuple

from headway.migration.homes import COMPAT, ORIGINAL, compat_module
from headway.migration.judging import module_for
from headway.migration.reading import Script, imports_original, inside

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class Source(NamedTuple):
    """A script's text, and how it is written in its file.

    Args:
        text: with the line endings that it has.
        encoding: as its first lines declare it.
    """

    text: str
    encoding: str

    @classmethod
    def read(cls, content: bytes) -> Source:
        """Decode a script as Python does.

        Raises:
            SyntaxError: the declared encoding is unknown.
            UnicodeDecodeError: the bytes are not in it.
        """
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return cls(content.decode(encoding), encoding)

    @property
    def content(self) -> bytes:
        """The bytes of the file."""
        return self.text.encode(self.encoding)


class _Edit(NamedTuple):
    """A part of the text that is replaced; positions count characters from the start."""

    start: int
    end: int
    text: str


def rewritten(source: Source, script: Script, *, compat: bool = False) -> Source:
    """Return the source with the imports of Accelerate changed.

    `import accelerate` becomes `import headway.compat as accelerate`; `from accelerate import ...`
    imports from `headway` if all names are right there, and from `headway.compat` otherwise.

    Args:
        compat: import from `headway.compat` only.

    Raises:
        ValueError: an import is written in a way that cannot be changed.
    """
    positions = _Positions(source.text)
    edits: list[_Edit] = []
    for node in script.imports:
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = module_for(inside(node.module or ""), names, compat=compat)
            edits.append(_module_edit(node, positions, module))
        else:
            edits += _name_edits(node, positions)
    text = source.text
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    if Script(text).imports:
        raise ValueError("an import of Accelerate is left")
    return source._replace(text=text)


class _Positions:
    """Where the lines of a text begin."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = _LINE.findall(text)
        self._starts = list(accumulate(map(len, self._lines), initial=0))

    def of(self, line: int, offset: int) -> int:
        """Return the position of a line (from 1) and an offset in UTF-8 bytes, as in `ast`."""
        before = self._lines[line - 1].encode()[:offset].decode()
        return self._starts[line - 1] + len(before)


def _module_edit(node: ast.ImportFrom, positions: _Positions, module: str) -> _Edit:
    """Return the edit of the module in `from module import ...`."""
    start = positions.of(node.lineno, node.col_offset)
    statement = positions.text[start:]
    tokens = tokenize.generate_tokens(io.StringIO(statement, newline="").readline)
    words = list(takewhile(lambda token: token.string != "import", tokens))
    within = _Positions(statement)
    places = [within.of(row, 0) + column for row, column in (words[1].start, words[-1].end)]
    return _Edit(start + places[0], start + places[1], module)


def _name_edits(node: ast.Import, positions: _Positions) -> Iterator[_Edit]:
    for alias in node.names:
        if imports_original(node, alias):
            start = positions.of(alias.lineno, alias.col_offset)
            # `import accelerate.utils` binds `accelerate`, whose modules are attributes
            whole = f"{COMPAT} as {ORIGINAL}"
            new = compat_module(inside(alias.name)) if alias.asname else whole
            yield _Edit(start, start + len(alias.name), new)
