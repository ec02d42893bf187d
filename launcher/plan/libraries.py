"""The training libraries that a launch joins, and whether it does."""

from __future__ import annotations

from typing import NamedTuple

from headway.launcher.plan.program import Program
from headway.settings.table import TABLE, YES, Settings


class Hook(NamedTuple):
    """A training library that is joined when the script imports it."""

    name: str  # for messages
    module: str  # after whose import
    joins: str  # our module that does it


HOOKS = (
    Hook("transformers' Trainer", "transformers.trainer", "headway.libraries.trainer"),
    *(
        Hook("Lightning's Trainer", f"{package}.trainer.trainer", "headway.libraries.lightning")
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
)
OF_ACCELERATE = (
    *("transformers", "trl", "sentence_transformers", "setfit", "unsloth", "axolotl"),
    "llamafactory",
)
"""Packages that train with transformers' Trainer, and so with Accelerate's runtime."""
LIBRARIES = (*OF_ACCELERATE, "lightning", "pytorch_lightning")
"""Packages whose import leads to that of a library of HOOKS."""


def why_not_joined(
    settings: Settings, program: Program, supervised: str | None, in_process: bool
) -> str | None:
    """Return why no library is joined in the script's process; None: each is, once imported.

    One process without a launcher is plain Python, unless its script imports a library, itself or
    by its own modules.
    """
    if settings.library_hooks != YES:
        return settings.where("library_hooks")
    if program.kind == "program":
        return "it is no Python script"
    if supervised is not None or in_process or settings.are_user_set("library_hooks"):
        return None
    if program.libraries:
        return None
    return (
        f"one process whose script and its modules import none ({TABLE['library_hooks'].flag} asks)"
    )
