"""Finds the Python scripts below folders, reads them, changes their imports from Accelerate to
Headway and nothing else in their text, and replaces their files.
"""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import shutil
import tempfile
import tokenize
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from headway.errors import ConfigError
from headway.migration.homes import COMPAT, ORIGINAL, compat_module, module_for
from headway.migration.reading import Script, imports_original, inside

_VIRTUAL_ENVIRONMENT = "pyvenv.cfg"
_NOTEBOOK = ".ipynb"
_FROM = re.compile(rb"from[\s\\]+(?P<module>\w+(?:[\s\\]*\.[\s\\]*\w+)*)[\s\\]+import\b")


class Source(NamedTuple):
    """A script's text, and how it is written in its file."""

    text: str  # with the line endings that it has
    encoding: str  # as its first lines declare it

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


def find_scripts(path: str) -> Iterator[str]:
    """Return `path` itself, or all `.py` files below it, in order.

    Hidden folders and virtual environments are left out.
    """
    if path.endswith(_NOTEBOOK):
        raise ConfigError(
            f"{path} is a Jupyter notebook, and only scripts are read",
            where="the command line",
            fix=f"`jupyter nbconvert --to script {shlex.quote(path)}`, or change the imports in its"
            " cells",
        )
    if not os.path.exists(path):
        raise ConfigError(
            f"there is no {path}", where="the command line", fix="name a script or a folder"
        )
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, files in os.walk(path):
        if _VIRTUAL_ENVIRONMENT in files:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        yield from (os.path.join(folder, name) for name in sorted(files) if name.endswith(".py"))


def read_script(path: str) -> tuple[Source, Script]:
    """Read and parse a script."""
    try:
        with open(path, "rb") as file:
            source = Source.read(file.read())
        return source, Script(source.text)
    except OSError as error:
        what, where = f"the script cannot be read: {error.strerror}", path
    except SyntaxError as error:
        what, where = f"this is not Python: {error.msg}", f"{path}, line {error.lineno or 1}"
    except (ValueError, RecursionError) as error:
        what, where = f"this is not Python: {error}", path
    raise ConfigError(what, where=where, fix="name Python scripts that run under this Python")


def replace_script(path: str, source: Source) -> None:
    """Replace a script in full or not at all; it keeps its permissions, and a link stays one."""
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    try:
        if not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError(0, "it is read-only")
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as beside:
            written = os.path.join(beside, name)
            with open(written, "wb") as file:
                file.write(source.content)
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(target, written)
            os.replace(written, target)
    except OSError as error:
        raise ConfigError(
            f"the script cannot be written: {error.strerror}",
            where=path,
            fix="make it and its folder writable",
        ) from None


def rewritten(source: Source, script: Script, *, compat: bool = False) -> Source:
    """Return the source with the imports of Accelerate changed.

    `import accelerate` becomes `import headway.compat as accelerate`; `from accelerate import ...`
    imports from `headway` if all names are right there, and from `headway.compat` otherwise, or
    always with `compat`.

    Raises:
        ValueError: an import of Accelerate would be left.
    """
    text = source.text.encode()  # `ast` counts bytes of UTF-8
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    edits = [edit for node in script.imports for edit in _edits(node, text, starts, compat)]
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new.encode() + text[end:]
    changed = text.decode()
    if Script(changed).imports:
        raise ValueError("an import of Accelerate is left")
    return source._replace(text=changed)


def _edits(
    node: ast.Import | ast.ImportFrom, text: bytes, starts: list[int], compat: bool
) -> Iterator[tuple[int, int, str]]:
    """Yield parts of the text, by their start and end, and what replaces each.

    `starts` are the positions of its lines.
    """
    if isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names]
        module = module_for(inside(node.module or ""), names, compat=compat)
        found = _FROM.match(text, starts[node.lineno - 1] + node.col_offset)
        if found is not None:
            yield found.start("module"), found.end("module"), module
        return
    for alias in node.names:
        if imports_original(node, alias):
            start = starts[alias.lineno - 1] + alias.col_offset
            # `import accelerate.utils` binds `accelerate`, whose modules are attributes
            whole = f"{COMPAT} as {ORIGINAL}"
            new = compat_module(inside(alias.name)) if alias.asname else whole
            yield start, start + len(alias.name), new
