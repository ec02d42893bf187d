"""Analyzes scripts: finds the names that they use from Accelerate, and rewrites their imports.

The analysis reads the syntax tree; scripts are not executed.
"""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from itertools import accumulate, chain
from typing import NamedTuple

from headway.errors import Code, ConfigError
from headway.migration.mapping import (
    COMPAT,
    ORIGINAL,
    compat_module,
    has,
    is_module,
    joined,
    module_for,
)
from headway.migration.missing import Feature, feature_of_member, feature_of_module, feature_of_name

ACCELERATOR = "Accelerator"

Lines = set[int]

_VIRTUAL_ENVIRONMENT = "pyvenv.cfg"
_SCHEDULE = re.compile("LR$|[Ss]chedule")
_FROM = re.compile(rb"from[\s\\]+(?P<module>\w+(?:[\s\\]*\.[\s\\]*\w+)*)[\s\\]+import\b")


class Script:
    """A parsed script; `attributes` are the attributes of an Accelerator that it uses.

    Raises:
        SyntaxError: The text is not valid in this Python version.
        ValueError: The text contains null bytes.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.imports: list[ast.Import | ast.ImportFrom] = []
        self.packages: set[str] = set()
        self.names: defaultdict[tuple[str, str], Lines] = defaultdict(set)
        """Lines, keyed by module (relative to `accelerate`) and name ("" for the module)."""
        self.attributes: defaultdict[str, Lines] = defaultdict(set)
        self.assigned: set[str] = set()  # attributes that the script adds to an Accelerator
        self.keywords: defaultdict[str, Lines] = defaultdict(set)
        """Lines, keyed by the arguments of `Accelerator(...)` that are not None."""
        self.schedules: Lines = set()  # of calls that seem to create an LR scheduler
        self._modules: dict[str, str] = {}  # Accelerate's modules by the script's names
        nodes = [*ast.walk(ast.parse(text))]
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._read_import(node)
        self._accelerators = _accelerator_names(nodes)
        for node in nodes:
            if isinstance(node, ast.Attribute):
                self._read_attribute(node)
            elif isinstance(node, ast.Call) and _creates(node):
                for keyword in node.keywords:
                    if keyword.arg is not None and ast.unparse(keyword.value) != "None":
                        self.keywords[keyword.arg].add(node.lineno)
            elif isinstance(node, ast.Call) and _SCHEDULE.search(_name_of(node.func)):
                self.schedules.add(node.lineno)

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
                self._bind(relative_name(statement.module or ""), alias)
            elif imports_original(statement, alias):
                module = relative_name(alias.name)
                self._modules[alias.asname or ORIGINAL] = module if alias.asname else ""
                if module:
                    self.names[module, ""].add(alias.lineno)

    def _bind(self, module: str, alias: ast.alias) -> None:
        whole = f"{module}.{alias.name}".lstrip(".")
        if is_module(whole):
            self._modules[alias.asname or alias.name] = whole
            self.names[whole, ""].add(alias.lineno)
        else:
            self.names[module, alias.name].add(alias.lineno)

    def _read_attribute(self, node: ast.Attribute) -> None:
        line, module = node.end_lineno or node.lineno, self._module(node.value)
        if module is None and (_creates(node.value) or _name_of(node.value) in self._accelerators):
            self.attributes[node.attr].add(line)
            if isinstance(node.ctx, ast.Store):
                self.assigned.add(node.attr)
        elif module is not None and self._module(node) is None:
            self.names[module, node.attr].add(line)

    def _module(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._modules.get(node.id)
        if isinstance(node, ast.Attribute) and (parent := self._module(node.value)) is not None:
            module = f"{parent}.{node.attr}".lstrip(".")
            return module if is_module(module) else None
        return None


def _creates(value: ast.AST | None) -> bool:
    return isinstance(value, ast.Call) and _name_of(value.func) == ACCELERATOR


def _accelerator_names(nodes: list[ast.AST]) -> set[str]:
    """Return the names of variables and attributes that refer to an Accelerator."""
    made = [node for node in nodes if _creates(getattr(node, "value", None))]
    targets = [getattr(node, "targets", None) or [getattr(node, "target", None)] for node in made]
    return {ACCELERATOR.lower(), *map(_name_of, chain(*targets))} - {""}


def _name_of(called: ast.expr | None) -> str:
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def shown(module: str, name: str) -> str:
    return joined(joined(ORIGINAL, module), name)


def imports_original(node: ast.Import | ast.ImportFrom, alias: ast.alias | None = None) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and _is_original(node.module or "")
    return any(_is_original(name.name) for name in ([alias] if alias else node.names))


def relative_name(module: str) -> str:
    return module.removeprefix(ORIGINAL).removeprefix(".")


def _is_original(module: str) -> bool:
    return module == ORIGINAL or module.startswith(f"{ORIGINAL}.")


def find_scripts(path: str) -> Iterator[str]:
    """Yield `path` or, for a folder, its `.py` files outside hidden folders and environments."""
    if not os.path.exists(path):
        raise ConfigError(
            f"{path} does not exist",
            where="the command line",
            fix="pass a script or a folder",
            code=Code.UNREADABLE,
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
            f"cannot read the Python script: {error}",
            where=path,
            fix="pass a UTF-8 script that runs with this Python; convert a notebook with `jupyter"
            " nbconvert --to script`",
            code=Code.UNREADABLE,
        ) from None


def replace_script(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        what = f"cannot write the script: {error.strerror}"
        raise ConfigError(what, where=path, fix="make it writable", code=Code.UNWRITABLE) from None


def with_new_imports(script: Script, *, compat: bool = False) -> str:
    """Return the text of a script with the imports of Accelerate rewritten.

    `import accelerate` becomes `import headway.compat as accelerate`. `from accelerate import ...`
    becomes an import from `headway` if it has all names and `compat` is not set, otherwise from
    `headway.compat`.

    Raises:
        ValueError: An import of Accelerate would remain.
    """
    text = script.text.encode()  # `ast` counts UTF-8 bytes
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    edits = [edit for node in script.imports for edit in _edits(node, text, starts, compat)]
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new.encode() + text[end:]
    changed = text.decode()
    if Script(changed).imports:
        raise ValueError("an import of Accelerate remains")
    return changed


def _edits(
    node: ast.Import | ast.ImportFrom, text: bytes, starts: list[int], compat: bool
) -> Iterator[tuple[int, int, str]]:
    """Yield the start, end and new text of each edit; `starts` are the offsets of the lines."""
    if isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names]
        module = module_for(relative_name(node.module or ""), names, compat=compat)
        found = _FROM.match(text, starts[node.lineno - 1] + node.col_offset)
        if found is not None:
            yield found.start("module"), found.end("module"), module
        return
    for alias in node.names:
        if imports_original(node, alias):
            start = starts[alias.lineno - 1] + alias.col_offset
            # `import accelerate.utils` binds `accelerate`, whose modules are attributes
            whole = f"{COMPAT} as {ORIGINAL}"
            new = compat_module(relative_name(alias.name)) if alias.asname else whole
            yield start, start + len(alias.name), new


MISSING, DIFFERS, SAME = "missing", "differs", "same"
"""The status of a name in Headway; rows are sorted in this order."""


class Finding(NamedTuple):
    name: str
    lines: list[int]
    status: str
    what: str = ""  # how it differs, or its purpose
    instead: str = ""  # why it differs, or what to use instead


class ApiDifference(NamedTuple):
    names: tuple[str, ...]
    how: str  # the visible difference
    why: str  # the reason, or what to change


SCHEDULE_STEPS = ApiDifference(
    ("Accelerator.prepare",),
    "an LR scheduler steps once per optimizer step; in Accelerate, it steps once per rank",
    "set its length in optimizer steps: len(loader) after prepare, without a factor"
    " of num_processes; or run `headway adopt --compat`",
)
DIFFERENCES = (
    SCHEDULE_STEPS,
    ApiDifference(
        ("Accelerator.prepare",),
        "the samples of an incomplete last round are distributed over the ranks; Accelerate pads"
        " the round with repeated samples",
        "fewer repeated samples in the last step of an epoch",
    ),
    ApiDifference(
        ("Accelerator.prepare",),
        "a shuffled loader has another order, except in the first epoch on one rank",
        "the order does not depend on the number of ranks; for Accelerate's order, run `headway"
        " adopt --compat`",
    ),
    ApiDifference(
        ("Accelerator.reduce",),
        "reduction='none' keeps each rank's values; Accelerate sums them. scale is applied;"
        " Accelerate applies it only on TPUs",
        "the arguments behave as documented",
    ),
    ApiDifference(
        ("accelerate.find_executable_batch_size", "accelerate.utils.find_executable_batch_size"),
        "each attempt halves the batch size; Accelerate multiplies it by 0.9",
        "finds a batch size in fewer attempts",
    ),
    ApiDifference(
        ("Accelerator.load_state",),
        "a loader resumes within its epoch; in Accelerate it restarts the epoch",
        "remove code that skips batches, except skip_first_batches()",
    ),
    ApiDifference(
        ("Accelerator.prepare",),
        "each rank reads the whole IterableDataset and keeps its shard; in Accelerate only rank 0"
        " reads it",
        "pass DataLoaderConfiguration(dispatch_batches=True) to read only on rank 0",
    ),
    ApiDifference(
        ("Accelerator.prepare",),
        "an LR scheduler whose optimizer is not prepared raises an error; in Accelerate it follows"
        " all prepared optimizers",
        "prepare the optimizer of each LR scheduler",
    ),
    ApiDifference(
        ("Accelerator(split_batches=)",),
        "each batch is split over the ranks; in Accelerate the argument has no effect",
        "remove it to keep the batch size per rank",
    ),
    ApiDifference(
        ("accelerate.DataLoaderConfiguration", "accelerate.utils.DataLoaderConfiguration"),
        "with dispatch_batches=True, each rank collates its own samples; Accelerate collates on"
        " rank 0 and slices the batches",
        "supports batches of any shape",
    ),
    ApiDifference(
        ("Accelerator.clip_grad_norm_", "Accelerator.clip_grad_value_"),
        "gradients are not clipped during accumulation; Accelerate clips each partial sum",
        "the norm of a partial sum is not the norm of the gradient",
    ),
)


def findings_of(script: Script, *, compat: bool = False) -> list[Finding]:
    """Return the names that a script uses, sorted by status: missing, differs, same.

    All known differences are listed, even if they do not affect the script. The difference for LR
    schedulers is listed with the lines that may create one. Names from `headway.compat` have no
    differences.
    """
    rows = []
    for row in (*_names(script), *_members(script)):
        is_like = compat or row.status == MISSING or _is_from_compat(script, row.name)
        known = () if is_like else DIFFERENCES
        found = [difference for difference in known if row.name in difference.names]
        for d in found:
            lines = {*row.lines, *(script.schedules if d is SCHEDULE_STEPS else ())}
            rows.append(Finding(row.name, sorted(lines), DIFFERS, d.how, d.why))
        rows += [] if found else [row]
    order = [MISSING, DIFFERS, SAME]
    return sorted(rows, key=lambda row: (order.index(row.status), row.lines))


def _is_from_compat(script: Script, shown_name: str) -> bool:
    """Return whether `with_new_imports` imports a name, or its class, from `headway.compat`."""
    name = ACCELERATOR if shown_name.startswith(ACCELERATOR) else shown_name.rpartition(".")[2]
    binds = [
        statement
        for statement in script.imports
        if isinstance(statement, ast.Import) or name in {alias.name for alias in statement.names}
    ]
    return all(map(_imports_compat, binds or script.imports))


def _imports_compat(statement: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(statement, ast.Import):
        return True
    names = [alias.name for alias in statement.names]
    return module_for(relative_name(statement.module or ""), names).startswith(COMPAT)


def _names(script: Script) -> list[Finding]:
    rows = []
    for (module, name), lines in script.names.items():
        if name:
            is_there, feature = has(module_for(module, [name]), name), feature_of_name(module, name)
        else:
            feature = feature_of_module(module)
            is_there = feature is None and is_module(module)
        rows.append(_row(shown(module, name), lines, is_there, feature))
    return rows


def _members(script: Script) -> list[Finding]:
    from headway.training.arguments import UNSUPPORTED  # imports torch

    accepted = signature(getattr(import_module(COMPAT), ACCELERATOR)).parameters
    differ = {name for difference in DIFFERENCES for name in difference.names}
    rows = []
    for name, lines in script.attributes.items():
        member, feature = f"{ACCELERATOR}.{name}", feature_of_member(name)
        if name in script.assigned:
            continue
        if feature is not None or member in differ:
            rows.append(_row(member, lines, feature is None, feature))
    for name, lines in script.keywords.items():
        row = _row(f"{ACCELERATOR}({name}=)", lines, name in accepted, feature_of_member(name))
        if row.status == MISSING:
            row = row._replace(instead=UNSUPPORTED.get(name, row.instead))
        rows.append(row)
    return rows


def _row(name: str, lines: Lines, is_there: bool, feature: Feature | None) -> Finding:
    if is_there:
        return Finding(name, sorted(lines), SAME)
    if feature is None:
        return Finding(name, sorted(lines), MISSING, "no counterpart in Headway", "remove it")
    return Finding(name, sorted(lines), MISSING, f"for {feature.what}", feature.fix)
