"""Joins the training libraries that a script imports, once it imports them; nothing before."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType

from headway.contract.notes import say
from headway.launcher.plan.libraries import HOOKS
from headway.launcher.rank.rank_monitor import AfterImport


def install() -> None:
    """Join the libraries of `HOOKS` after their import."""
    for hook in HOOKS:
        if (there := sys.modules.get(hook.module)) is not None:
            _join(hook.joins, there)
        else:
            sys.meta_path.insert(0, AfterImport(hook.module, partial(_join, hook.joins)))


def _join(joins: str, library: ModuleType) -> None:
    try:
        importlib.import_module(joins).join(library)
    except Exception as error:  # noqa: BLE001  another version of the library, which works alone
        say(
            f"note: {library.__name__} is not joined: {type(error).__name__}: {error}; it does"
            " not save when the job has to stop"
        )
