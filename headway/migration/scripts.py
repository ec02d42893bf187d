"""Finds Python scripts below folders, reads them, and changes their imports from Accelerate."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from itertools import accumulate

from headway.errors import ConfigError
from headway.migration.homes import COMPAT, ORIGINAL, compat_module, module_for
from headway.migration.reading import Script, imports_original, inside

_VIRTUAL_ENVIRONMENT = "pyvenv.cfg"
_FROM = re.compile(rb"from[\s\\]+(?P<module>\w+(?:[\s\\]*\.[\s\\]*\w+)*)[\s\\]+import\b")


def find_scripts(path: str) -> Iterator[str]:
    """Yield `path`, or all `.py` files below it in order; skip hidden folders and environments."""
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


def read_script(path: str) -> Script:
    try:
        if path.endswith(".ipynb"):
            raise ValueError("it is a Jupyter notebook")
        with open(path, encoding="utf-8", newline="") as file:
            return Script(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"this is no Python script that can be read: {error}",
            where=path,
            fix="name a script in UTF-8 that runs under this Python; of a notebook, `jupyter"
            " nbconvert --to script` makes one",
        ) from None


def replace_script(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"the script cannot be written: {error.strerror}", where=path, fix="make it writable"
        ) from None


def rewritten(script: Script, *, compat: bool = False) -> str:
    """Return the text of a script with the imports of Accelerate changed.

    `import accelerate` becomes `import headway.compat as accelerate`; `from accelerate import ...`
    imports from `headway` if all names are right there, and from `headway.compat` otherwise, or
    always with `compat`.

    Raises:
        ValueError: an import of Accelerate would be left.
    """
    text = script.text.encode()  # `ast` counts bytes of UTF-8
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    edits = [edit for node in script.imports for edit in _edits(node, text, starts, compat)]
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new.encode() + text[end:]
    changed = text.decode()
    if Script(changed).imports:
        raise ValueError("an import of Accelerate is left")
    return changed


def _edits(
    node: ast.Import | ast.ImportFrom, text: bytes, starts: list[int], compat: bool
) -> Iterator[tuple[int, int, str]]:
    """Yield the start, end and new text of each edit; `starts` are the positions of the lines."""
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
