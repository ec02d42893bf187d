"""Lists the names of Accelerate that a script imports and uses, by the text of its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Hashable
from typing import TypeVar

from headway.migration.homes import ORIGINAL, is_module, joined

ACCELERATOR = "Accelerator"
T = TypeVar("T", bound=Hashable)

Lines = list[int]


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
