"""Every public name has a docstring with an example, and all examples run.

A function or class has an example of its own; a method has one, or is called in another example of
its class; a property needs none. Examples of the Accelerator's methods begin with `Accelerator`,
`accelerator` and `torch`; all others import what they use.
"""

from __future__ import annotations

import doctest
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import headway
from docs.reference import is_nested
from headway import Accelerator
from headway.distributed.process import Process
from headway.state import AcceleratorState, GradientState
from headway.trackers import choice

PLACES = {
    "headway": headway.__all__,
    "headway.utils": import_module("headway.utils").__all__,
    "headway.tracking": import_module("headway.tracking").__all__,
    "headway.state": ["PartialState", "AcceleratorState", "GradientState"],
    "headway.logging": ["get_logger", "MultiProcessAdapter"],
    "headway.notebook": ["notebook_launcher", "debug_launcher"],
}
STARTS_RANKS = (
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # beside pytest's own threads
)


def public() -> dict[str, Any]:
    """Return the public classes and functions by the path of their definition."""
    found = (getattr(import_module(place), name) for place, all_ in PLACES.items() for name in all_)
    named = [item for item in found if inspect.isclass(item) or inspect.isfunction(item)]
    return {f"{obj.__module__}.{obj.__qualname__}": obj for obj in named if not is_nested(obj)}


def classes() -> dict[str, type]:
    return {path: obj for path, obj in public().items() if inspect.isclass(obj)}


def own_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.startswith("headway.")]


def members(kind: type) -> dict[str, Any]:
    """Return the public methods and properties of a class that are Headway's."""
    names = dict.fromkeys(name for base in own_bases(kind) for name in vars(base))
    static = {name: inspect.getattr_static(kind, name) for name in names if name[0] != "_"}
    kinds = (property, staticmethod, classmethod)
    return {
        name: obj
        for name, obj in static.items()
        if inspect.isfunction(obj) or isinstance(obj, kinds)
    }


def examples(kind: type) -> str:
    """Return the source of all examples in a class, its bases and their methods."""
    parser = doctest.DocTestParser()
    docs = [obj.__doc__ for base in own_bases(kind) for obj in (base, *members(base).values())]
    parsed = (parser.get_examples(text) for text in docs if isinstance(text, str))
    return "".join(example.source for each in parsed for example in each)


def needs_a_package() -> set[type]:
    """Return the trackers that need another package; tests/trackers runs these."""
    return {tracker for tracker in choice.LOGGER_TYPE_TO_CLASS.values() if tracker.packages}


def defining_modules() -> list[str]:
    found = {base.__module__ for class_ in classes().values() for base in own_bases(class_)}
    return sorted(found | {obj.__module__ for obj in public().values()})


def test_every_public_name_has_a_docstring() -> None:
    missing = [path for path, obj in public().items() if not inspect.getdoc(obj)]
    for path, kind in classes().items():
        missing += [
            f"{path}.{name}" for name in members(kind) if not inspect.getdoc(getattr(kind, name))
        ]
    assert not missing


def test_every_public_name_has_an_example() -> None:
    exempt = needs_a_package()
    missing = [
        path
        for path, obj in public().items()
        if obj not in exempt and ">>> " not in (obj.__doc__ or "")
    ]
    for path, kind in classes().items():
        shown = "" if kind in exempt else examples(kind)
        missing += [
            f"{path}.{name}"
            for name, member in members(kind).items()
            if kind not in exempt
            and not isinstance(member, property)
            and not re.search(rf"\.{name}\b", shown)
        ]
    assert not missing


def test_examples_are_sections_that_the_site_shows_as_such() -> None:
    docs = {path: inspect.getdoc(obj) or "" for path, obj in public().items()}
    for path, kind in classes().items():
        docs |= {f"{path}.{name}": inspect.getdoc(m) or "" for name, m in members(kind).items()}
    assert not [
        path for path, text in docs.items() if ">>>" in text and "\nExamples:\n" not in text
    ]


@pytest.fixture
def own_globals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what examples change for the whole process."""
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    logging.root.manager._clear_cache()  # type: ignore[attr-defined]
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # for replace_accelerate()
    accelerate = taken_modules("accelerate")
    with torch.random.fork_rng(devices=[]):
        yield
    choice.LOGGER_TYPE_TO_CLASS.pop("printer", None)
    taken_modules("accelerate")
    sys.modules.update(accelerate)
    logging.root.manager._clear_cache()  # type: ignore[attr-defined]


def taken_modules(package: str) -> dict[str, ModuleType]:
    """Remove a package from the imported modules, and return what was there."""
    names = [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]
    return {name: sys.modules.pop(name) for name in names}


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=STARTS_RANKS if module == "headway.notebook" else ())
        for module in defining_modules()
    ],
)
def test_the_examples_of(module: str, own_globals: None, capfd: pytest.CaptureFixture[str]) -> None:
    if module == "headway.notebook" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pytest.skip("no rank can be forked from a process that uses CUDA")
    said: list[str] = []
    for test in doctest.DocTestFinder().find(import_module(module)):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        test.globs = {"__name__": "__main__"} | given(test.name)
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)
    lines = capfd.readouterr().err.splitlines()
    lines = [line for line in lines if not line.startswith("USDT:")]  # from torch's profiler
    expected = int(module == "headway.accelerator")  # resume() says where training begins
    assert len(lines) == expected, lines


def given(name: str) -> dict[str, object]:
    """Return the names that the example at this path begins with."""
    owner = name.rpartition(".")[0]
    if owner not in [f"{kind.__module__}.{kind.__qualname__}" for kind in (Accelerator, Process)]:
        return {}
    return {"Accelerator": Accelerator, "accelerator": Accelerator(cpu=True), "torch": torch}
