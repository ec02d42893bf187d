"""Classes are joined by composition: few bases, no passing on of arguments, no private names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from inspect import getmodule, getsource
from pathlib import Path
from pydoc import locate
from typing import TypeGuard

import pytest

from tests.architecture.tree import ROOT, product_files

PRODUCT = sorted(set(product_files().values()))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MOST_BASES, MOST_LEVELS = 2, 3

OF_ACCELERATE = {"_reset_state", "_set_sync_gradients", "_shared_state"}
"""Private names that scripts and tests written for Accelerate use, and so do ours."""
OWN_OR_FOREIGN = ("self", "cls", "super()", "os", "c10d")
OF_TORCH = {"_parameters", "_buffers", "_next_data"}
"""Those of torch's modules and iterators, which some class of ours has as well."""


OF_OBJECTS = {
    name: f"torch.{of}"
    for of, names in {
        "nn.Module": "_apply _call_impl _compiled_call_impl _non_persistent_buffers_set",
        "nn.parallel.DistributedDataParallel": "_module_parameters",
        "distributed.ProcessGroup": "_get_backend _device_types",
        "_C._distributed_c10d.Backend.Options": "_timeout",
        "distributed.elastic.agent.server.SimpleElasticAgent": "_stop_workers _worker_group",
        "optim.lr_scheduler.LRScheduler": "_step_count",
        "utils.data.RandomSampler": "_num_samples",
        "Tensor": "_backward_hooks _post_accumulate_grad_hooks _cdata",
        "_ops.OpOverload": "_schema",
        "_dynamo.eval_frame.OptimizedModule": "_orig_mod",
    }.items()
    for name in names.split()
}
"""The classes of torch's objects of which the product reads private attributes and methods."""
OF_OTHERS = {
    *("_replace", "_asdict", "_fields", "_field_defaults", "_optionals"),  # of Python's objects
    *("_auto_add_worker_init_fn", "_can_stop_early", "_data_fetcher"),  # of Lightning's
    *("_should_check_val_fx", "_save_checkpoint", "_save_rng_state", "_bit_generator"),
    "_buckets",  # ours, assigned in a function
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STANDARD_MODULES = ("atexit.", "numpy.", "os.", "random.", "runpy.", "shutil.", "sys.", "headway.")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def trees(paths: list[Path]) -> Iterator[tuple[Path, ast.Module]]:
    for path in paths:
        yield path, tree_of(path)


def classes(paths: list[Path]) -> Iterator[tuple[Path, ast.ClassDef]]:
    for path, tree in trees(paths):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


def bases() -> dict[str, list[str]]:
    """Return the bases of ours of each class of ours, by their full names."""
    found: dict[str, list[str]] = {}
    for module, path in product_files().items():
        tree = tree_of(path)
        known = {node.name: f"{module}.{node.name}" for node in tree.body if is_class(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in tree.body:
            if is_class(node):
                first = [ast.unparse(base).partition("[")[0].split(".") for base in node.bases]
                full = [".".join([known.get(name, name), *rest]) for name, *rest in first]
                found[f"{module}.{node.name}"] = full
    return {name: [base for base in all_ if base in found] for name, all_ in found.items()}


def is_class(node: ast.stmt) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


def test_no_class_stands_on_many_others() -> None:
    of = bases()

    def levels(name: str) -> int:
        return 1 + max(map(levels, of[name]), default=0)

    assert {name: all_ for name, all_ in of.items() if len(all_) > MOST_BASES} == {}
    assert {name for name in of if levels(name) > MOST_LEVELS} == set()


def test_no_class_passes_on_what_it_does_not_know() -> None:
    of = bases()
    for module, path in product_files().items():
        for node in tree_of(path).body:
            if is_class(node) and of[f"{module}.{node.name}"]:
                for call in calls_of_super(node):
                    is_open = any(isinstance(arg, ast.Starred) for arg in call.args)
                    assert not is_open or all(keyword.arg for keyword in call.keywords), (
                        f"{path}, line {call.lineno}"
                    )


def calls_of_super(node: ast.ClassDef) -> Iterator[ast.Call]:
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and ast.unparse(part.func).startswith("super()."):
            yield part


@cache
def private_names(node: ast.ClassDef) -> set[str]:
    """Return the private attributes and methods that a class has of its own."""
    found = {part.name for part in ast.walk(node) if isinstance(part, FUNCTIONS)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            if isinstance(part.value, ast.Name) and part.value.id in ("self", "cls"):
                found.add(part.attr)
        elif isinstance(part, ast.Assign):
            found |= {to.id for to in part.targets if isinstance(to, ast.Name)}
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def with_own_names(node: ast.AST, own: set[str]) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield all nodes below, each with the private names of the classes that it stands in."""
    for child in ast.iter_child_nodes(node):
        names = own | private_names(child) if isinstance(child, ast.ClassDef) else own
        yield child, names
        yield from with_own_names(child, names)


def taken_from_others(paths: list[Path]) -> Iterator[str]:
    """Yield where code reads a private name of a class of ours from outside of that class."""
    ours = set().union(*(private_names(node) for _, node in classes(PRODUCT)))
    for path, tree in trees(paths):
        for node, own in with_own_names(tree, set()):
            if not isinstance(node, ast.Attribute) or node.attr not in ours:
                continue
            owner = ast.unparse(node.value)
            allowed = OF_ACCELERATE | OF_TORCH | own
            if owner not in OWN_OR_FOREIGN and node.attr not in allowed:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"


def test_no_code_reads_private_names_of_a_class() -> None:
    assert [*taken_from_others(PRODUCT + TESTS)] == []


def test_no_two_public_classes_have_one_name() -> None:
    names = Counter(node.name for _, node in classes(PRODUCT) if node.name[0] != "_")
    assert {name for name in names if names[name] > 1} == {"Accelerator"}  # compat's, too


def test_a_run_s_end_is_written_once() -> None:
    names = Counter(
        node.name
        for _, tree in trees(PRODUCT)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    )
    assert names["end_training"] == 1


def test_the_accelerator_defines_its_methods_itself_but_those_of_a_process() -> None:
    tree = ast.parse((ROOT / "headway" / "accelerator.py").read_text())
    (found,) = [n for n in tree.body if getattr(n, "name", "") == "Accelerator"]
    assert isinstance(found, ast.ClassDef)
    assert [ast.unparse(base) for base in found.bases] == ["Process"]
    longest = max(
        (n for n in found.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"),
        key=lambda one: sum(not isinstance(part, ast.Expr) for part in one.body),
    )
    assert len(longest.body) <= 5, f"{longest.name} is the work of a part"


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the full name of each name that a module imports or that stands for a module."""
    known = {"torch": "torch", "c10d": "torch.distributed.distributed_c10d"}
    known["_aten"] = "torch.ops.aten"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {one.asname: one.name for one in node.names if one.asname}
        elif isinstance(node, ast.ImportFrom):
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return known


def private_names_of_torch() -> Iterator[str]:
    """Yield the private names that the product reads from torch's modules and objects."""
    ours = set().union(*(private_names(node) for _, node in classes(PRODUCT)))
    for _, tree in trees(PRODUCT):
        known = imported_names(tree)
        yield from (name for name in known.values() if re.match(r"torch\..*\b_", name))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not re.match("_[a-zA-Z]", node.attr):
                continue
            text = re.sub(r"^import_module\('([\w.]+)'\)", r"\1", ast.unparse(node))
            first, _, rest = text.partition(".")
            name = f"{known.get(first, first)}.{rest}"
            if node.attr in OF_OBJECTS:
                yield f"{OF_OBJECTS[node.attr]}.{node.attr}"
            elif name.startswith("torch."):
                yield name
            elif node.attr not in ours | OF_OTHERS:
                assert name.startswith(STANDARD_MODULES), f"add {text} to OF_OBJECTS or OF_OTHERS"


def is_in_torch(name: str) -> bool:
    """Return whether a name exists, or whether the module of its class assigns it to objects."""
    owner, _, attribute = name.rpartition(".")
    module = getmodule(locate(owner))
    return locate(name) is not None or f".{attribute}" in (getsource(module) if module else "")


def test_every_private_name_of_torch_that_is_used_is_in_this_torch() -> None:
    pytest.importorskip("torch")
    names = {*private_names_of_torch()}
    assert [name for name in sorted(names) if not is_in_torch(name)] == []
    assert {name.rpartition(".")[2] for name in names} >= {
        *("_sync_module_states", "_get_default_store", "_set_pg_timeout", "_get_backend"),
        *("_new_process_group_helper", "_world", "_disable_current_modes"),
    }
