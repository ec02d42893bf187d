"""Reads a script's syntax tree for what it takes from Accelerate: names, members, arguments."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from headway.migration.homes import ORIGINAL, is_module, joined

ACCELERATOR = "Accelerator"
STATES = ("AcceleratorState", "PartialState", "GradientState")
_CLASSES = (ACCELERATOR, *STATES)  # whose members are looked at
_MEMBER_CLASSES = {
    (ACCELERATOR, "state"): "AcceleratorState",
    (ACCELERATOR, "gradient_state"): "GradientState",
}
_USUAL_NAMES = ("accelerator", "_accelerator")  # of an Accelerator that comes from elsewhere
_OF_TESTS = re.compile(
    r"(?:os\.)?(?:environ(?:\.get\(|\[)|getenv\()'\w*TEST\w*'(?:, (?P<otherwise>.+))?[\])]"
)
"""An environment variable that tests of the script set."""
_PASSED = ("scheduler", "loader")  # kinds of objects that are known by the names of variables


class Kind(Enum):
    """What a script takes."""

    MODULE = "module"
    NAME = "name"  # of a module
    MEMBER = "member"  # of a class
    ARGUMENT = "argument"  # a keyword of a function, class or method
    PASSED = "passed"  # an object that prepare() is given


class Need(NamedTuple):
    """One thing that a script takes from Accelerate.

    Its owner is the module below `accelerate` (`` is the package), the class (`Accelerator`), or
    what is called (`Accelerator.prepare`).
    """

    kind: Kind
    owner: str
    name: str = ""  # in its owner; `` for a module

    def __str__(self) -> str:
        if self.kind is Kind.ARGUMENT:
            return f"{self.owner}({self.name}=)"
        if self.kind is Kind.PASSED:
            return f"{self.owner}({self.name})"
        owner = self.owner if self.kind is Kind.MEMBER else joined(ORIGINAL, self.owner)
        return f"{owner}.{self.name}" if self.name else owner


class Script:
    """A parsed script.

    Raises:
        SyntaxError: it is not Python of this version.
        ValueError: it contains null bytes.
    """

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self._nodes = [*_in_a_run(self.tree)]
        self.imports = [
            node
            for node in self._nodes
            if isinstance(node, ast.Import | ast.ImportFrom) and imports_original(node)
        ]
        self._modules: dict[str, str] = {}  # the script's names for modules of Accelerate
        self._names: dict[str, tuple[str, str]] = {}  # and for names of these modules
        self._others: set[str] = set()  # names of other modules
        self._variables: dict[str, str] = {}  # `self.accelerator` -> its class
        for node in self._nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._bind(node)
        for node in self._nodes:
            self._infer(node)

    @cached_property
    def needs(self) -> dict[Need, list[int]]:
        """What the script takes from Accelerate, and in which lines; empty if it imports none."""
        found: dict[Need, list[int]] = {}
        if self.imports:
            for need, line in sorted(self._needs(), key=lambda one: one[1]):
                lines = found.setdefault(need, [])
                if line not in lines:
                    lines.append(line)
        return found

    # ------------------------------------------------------------------ what names mean

    def _bind(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            local = alias.asname or alias.name.split(".")[0]
            if not imports_original(node, alias):
                self._others.add(local)
            elif isinstance(node, ast.Import):
                self._modules[local] = inside(alias.name) if alias.asname else ""
            else:
                module = inside(node.module or "")
                submodule = f"{module}.{alias.name}".removeprefix(".")
                if is_module(submodule):
                    self._modules[local] = submodule
                else:
                    self._names[local] = (module, alias.name)

    def _infer(self, node: ast.AST) -> None:
        """Note the classes of variables and arguments."""
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
            kind = self._class_of(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in map(_dotted, targets):
                if target and kind:
                    self._variables[target] = kind
        elif isinstance(node, ast.arg) and node.annotation:
            for part in ast.walk(node.annotation):
                named = self._named(part)
                if named and named[1] in _CLASSES:
                    self._variables[node.arg] = named[1]

    def _module(self, node: ast.AST) -> str | None:
        """Return the module of Accelerate that an expression is."""
        if isinstance(node, ast.Name):
            return self._modules.get(node.id)
        if isinstance(node, ast.Attribute):
            parent = self._module(node.value)
            if parent is not None:
                module = f"{parent}.{node.attr}".removeprefix(".")
                return module if is_module(module) else None
        return None

    def _named(self, node: ast.AST) -> tuple[str, str] | None:
        """Return the module and name, if an expression is a name of Accelerate."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute) and self._module(node) is None:
            module = self._module(node.value)
            return None if module is None else (module, node.attr)
        return None

    def _class_of(self, node: ast.AST) -> str | None:
        """Return the class of Accelerate that an expression is an object of."""
        if isinstance(node, ast.Call):
            named = self._named(node.func)
            return named[1] if named and named[1] in _CLASSES else None
        text = _dotted(node)
        if text in self._variables:
            return self._variables[text]
        if isinstance(node, ast.Attribute):
            owner = self._class_of(node.value)
            if owner is not None:
                return _MEMBER_CLASSES.get((owner, node.attr))
        root, _, _ = (text or "").partition(".")
        is_usual = text is not None and text.split(".")[-1] in _USUAL_NAMES
        return ACCELERATOR if is_usual and root not in self._others else None

    # ------------------------------------------------------------------ what is used

    def _needs(self) -> Iterator[tuple[Need, int]]:
        for statement in self.imports:
            for alias in statement.names:
                if imports_original(statement, alias):
                    need = self._imported(statement, alias)
                    if need is not None:
                        yield need, alias.lineno
        for node in self._nodes:
            if isinstance(node, ast.Attribute):
                used = self._used(node)
                if used is not None:
                    yield used, node.end_lineno or node.lineno
            elif isinstance(node, ast.Call):
                for need in self._given(node):
                    yield need, node.lineno

    def _imported(self, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> Need | None:
        if isinstance(statement, ast.Import):
            module = inside(alias.name)
            return Need(Kind.MODULE, module) if module else None
        local = alias.asname or alias.name
        if local in self._names:
            return Need(Kind.NAME, *self._names[local])
        return Need(Kind.MODULE, self._modules[local])

    def _used(self, node: ast.Attribute) -> Need | None:
        named = self._named(node)
        if named is not None:
            return Need(Kind.NAME, *named)
        owner = self._class_of(node.value)
        return None if owner is None else Need(Kind.MEMBER, owner, node.attr)

    def _given(self, call: ast.Call) -> Iterator[Need]:
        """Return the arguments of a call of Accelerate; None is as good as no argument."""
        named = self._named(call.func)
        if named is not None:
            called = joined(named[0], named[1]) if named[0] else named[1]
        elif isinstance(call.func, ast.Attribute) and (owner := self._class_of(call.func.value)):
            called = f"{owner}.{call.func.attr}"
        else:
            return
        for keyword in call.keywords:
            if keyword.arg is not None and not _is_none(keyword.value):
                yield Need(Kind.ARGUMENT, called, keyword.arg)
        if called == f"{ACCELERATOR}.prepare":
            texts = [(_dotted(argument) or "").lower() for argument in call.args]
            for word in _PASSED:
                if any(word in text for text in texts):
                    yield Need(Kind.PASSED, called, word)


def _in_a_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk through a tree, but not where an environment variable of tests has to be set."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        if isinstance(node, ast.If) and _holds_in_tests(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _holds_in_tests(condition: ast.expr) -> bool:
    """Return whether a condition holds only where an environment variable of tests is set."""
    if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
        return any(map(_holds_in_tests, condition.values))
    asked, equal = condition, "None"
    if isinstance(condition, ast.Compare) and isinstance(condition.ops[0], ast.Eq):
        asked, equal = condition.left, ast.unparse(condition.comparators[0])
    found = _OF_TESTS.fullmatch(ast.unparse(asked))
    otherwise = found and (found["otherwise"] or "None")
    if asked is condition:  # the variable itself
        return otherwise in ("None", "''", "False")
    return found is not None and otherwise != equal


def imports_original(node: ast.Import | ast.ImportFrom, alias: ast.alias | None = None) -> bool:
    """Return whether a statement (or one of its names) imports from Accelerate."""
    if isinstance(node, ast.ImportFrom):
        return not node.level and is_original(node.module or "")
    return any(is_original(one.name) for one in ([alias] if alias else node.names))


def is_original(module: str) -> bool:
    """Return whether a module is Accelerate or a part of it."""
    return module == ORIGINAL or module.startswith(f"{ORIGINAL}.")


def inside(module: str) -> str:
    """Return the name of one of Accelerate's modules below `accelerate`."""
    return module.removeprefix(ORIGINAL).removeprefix(".")


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _dotted(node: ast.AST) -> str | None:
    """Return `a.b.c` as text, None for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = _dotted(node.value)
        return None if value is None else f"{value}.{node.attr}"
    return None
