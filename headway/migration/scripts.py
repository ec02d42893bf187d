"""Finds Python scripts, lists what they use of Accelerate, and changes their imports.

The names that a script imports and uses are read from the text of its syntax tree.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Hashable, Iterator
from itertools import accumulate
from typing import TypeVar

from headway.errors import ConfigError
from headway.migration.homes import (
    COMPAT,
    ORIGINAL,
    compat_module,
    is_module,
    joined,
    module_for,
)

ACCELERATOR = "Accelerator"
T = TypeVar("T", bound=Hashable)

Lines = list[int]

_VIRTUAL_ENVIRONMENT = "pyvenv.cfg"
_FROM = re.compile(rb"from[\s\\]+(?P<module>\w+(?:[\s\\]*\.[\s\\]*\w+)*)[\s\\]+import\b")


class Script:
    """A parsed script. Types are not inferred: `attributes` are those of all objects.

    Raises:
        SyntaxError: it is not Python of this version.
        ValueError: it contains null bytes.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.imports: list[ast.Import | ast.ImportFrom] = []
        self.packages: set[str] = set()
        self.names: dict[tuple[str, str], Lines] = {}
        """Accelerate's module, below `accelerate`, and its name, empty for the module itself."""
        self.attributes: dict[str, Lines] = {}
        self.keywords: dict[str, Lines] = {}
        """The keyword arguments of calls of `Accelerator`, except those that are None."""
        self._modules: dict[str, str] = {}  # the script's names for modules of Accelerate
        nodes = [*ast.walk(ast.parse(text))]
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._read_import(node)
        for node in nodes:
            if isinstance(node, ast.Attribute):
                self._read_attribute(node)
            elif isinstance(node, ast.Call) and _name_of(node.func) == ACCELERATOR:
                for keyword in node.keywords:
                    if keyword.arg is not None and ast.unparse(keyword.value) != "None":
                        _note(self.keywords, keyword.arg, node.lineno)

    def _read_import(self, statement: ast.Import | ast.ImportFrom) -> None:
        if isinstance(statement, ast.Import):
            self.packages |= {alias.name.partition(".")[0] for alias in statement.names}
        elif not statement.level:
            self.packages.add((statement.module or "").partition(".")[0])
        if not imports_original(statement):
            return
        self.imports.append(statement)
        for alias in statement.names:
            if isinstance(statement, ast.ImportFrom):
                self._bind(inside(statement.module or ""), alias)
            elif imports_original(statement, alias):
                module = inside(alias.name)
                self._modules[alias.asname or ORIGINAL] = module if alias.asname else ""
                if module:
                    _note(self.names, (module, ""), alias.lineno)

    def _bind(self, module: str, alias: ast.alias) -> None:
        whole = f"{module}.{alias.name}".lstrip(".")
        if is_module(whole):
            self._modules[alias.asname or alias.name] = whole
            _note(self.names, (whole, ""), alias.lineno)
        else:
            _note(self.names, (module, alias.name), alias.lineno)

    def _read_attribute(self, node: ast.Attribute) -> None:
        line, module = node.end_lineno or node.lineno, self._module(node.value)
        if module is None:
            _note(self.attributes, node.attr, line)
        elif self._module(node) is None:
            _note(self.names, (module, node.attr), line)

    def _module(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._modules.get(node.id)
        if isinstance(node, ast.Attribute) and (parent := self._module(node.value)) is not None:
            module = f"{parent}.{node.attr}".lstrip(".")
            return module if is_module(module) else None
        return None


def _name_of(called: ast.expr) -> str:
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def _note(found: dict[T, Lines], name: T, line: int) -> None:
    lines = found.setdefault(name, [])
    if line not in lines:
        lines.append(line)


def shown(module: str, name: str) -> str:
    whole = joined(ORIGINAL, module)
    return f"{whole}.{name}" if name else whole


def imports_original(node: ast.Import | ast.ImportFrom, alias: ast.alias | None = None) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and _is_original(node.module or "")
    return any(_is_original(one.name) for one in ([alias] if alias else node.names))


def inside(module: str) -> str:
    return module.removeprefix(ORIGINAL).removeprefix(".")


def _is_original(module: str) -> bool:
    return module == ORIGINAL or module.startswith(f"{ORIGINAL}.")


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
