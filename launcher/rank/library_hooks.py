"""Joins torch and the training libraries, once the script imports them; nothing before."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType

from headway.contract.notes import say
from headway.launcher.plan.program import HOOKS
from headway.launcher.rank.rank_monitor import AfterImport


def install() -> None:
    """Hook the libraries of `HOOKS` after their import."""
    for hook in HOOKS:
        _join_after_import(hook.module, hook.joins, "it does not save when the job has to stop")


def see_steps() -> None:
    """Observe the steps of a script that trains by torch alone, after its import."""
    _join_after_import("torch", "headway.strategies.plain_steps", "its steps are not seen")


def _join_after_import(module: str, joins: str, otherwise: str) -> None:
    join = partial(_join, joins, otherwise)
    if (there := sys.modules.get(module)) is not None:
        join(there)
    else:
        sys.meta_path.insert(0, AfterImport(module, join))


def _join(joins: str, otherwise: str, library: ModuleType) -> None:
    try:
        importlib.import_module(joins).join(library)
    except Exception as error:  # noqa: BLE001  another version of the library, which works alone
        say(f"note: {library.__name__} is not joined: {type(error).__name__}: {error}; {otherwise}")
