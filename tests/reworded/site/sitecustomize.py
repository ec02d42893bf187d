"""Rewords what Headway says, in each Python that finds this file on its path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

BEFORE, AFTER = "(now) ", " (reworded)"

FIELDS: Mapping[str, Mapping[str, Sequence[str]]] = {  # module: class: what is said by its objects
    "headway.errors": {"Problem": ("what", "where", "fix"), "Step": ("note",)},
    "headway.contract.origin": {"Origin": ("reason",)},
    "headway.machine.facts": {
        "Machine": ("cores_reason", "gpus_reason", "mps_reason", "mps_fix", "torch_reason"),
    },
    "headway.machine.devices": {"Selection": ("passed_over", "problems")},
    "headway.commands.doctor": {"Check": ("what",)},
}
RESULTS: Mapping[str, Mapping[str, Sequence[str]]] = {  # module: class: what it works out and says
    "headway.contract.origin": {"Origin": ("__str__", "brief")},
    "headway.machine.facts": {
        "Machine": ("torch_obstacle", "why_no_gpu", "mask_fault"),
        "Gpu": ("obstacle",),
    },
    "headway.commands.doctor": {"Check": ("fix",)},
}


def reworded(value: Any) -> Any:
    """Return a text, or each text of a tuple, in other words; once only."""
    if isinstance(value, tuple):
        return tuple(map(reworded, value))
    if not isinstance(value, str) or not value or value.endswith(AFTER):
        return value
    return f"{BEFORE}{value}{AFTER}"


def _reword_fields(kind: Any, names: Sequence[str]) -> None:
    make = kind.__new__
    places = {name: kind._fields.index(name) for name in names}

    def new(cls: Any, *args: Any, **named: Any) -> Any:
        made = make(cls, *args, **named)
        values = list(made)
        for place in places.values():
            values[place] = reworded(values[place])
        return tuple.__new__(cls, values)

    def replaced(self: Any, **named: Any) -> Any:
        return new(type(self), **{**self._asdict(), **named})

    kind.__new__ = new
    kind._replace = replaced


def _reword_result(kind: Any, name: str) -> None:
    said = vars(kind)[name]
    if isinstance(said, property):
        setattr(kind, name, property(lambda self: reworded(said.fget(self))))  # type: ignore[misc]
    else:
        setattr(kind, name, lambda self: reworded(said(self)))


def reword(module: ModuleType) -> None:
    """Reword all that the classes of a module say."""
    for name, fields in FIELDS.get(module.__name__, {}).items():
        _reword_fields(getattr(module, name), fields)
    for name, results in RESULTS.get(module.__name__, {}).items():
        for result in results:
            _reword_result(getattr(module, name), result)


class _Rewording(MetaPathFinder):
    """Finds the modules above where Python does, and rewords them once they have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in FIELDS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        for finder in others:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = _then_reword(spec.loader)  # type: ignore[assignment,method-assign]
                return spec
        return None


def _then_reword(loader: Loader) -> Callable[[ModuleType], None]:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        reword(module)

    return exec_module


def install() -> None:
    """Reword what is imported from now on, and what has been."""
    if not any(type(finder).__name__ == _Rewording.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Rewording())
        for name in FIELDS:
            if name in sys.modules:
                reword(sys.modules[name])


install()
