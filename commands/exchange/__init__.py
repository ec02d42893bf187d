"""`headway config import` and `export`: settings of other tools, to and from ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from headway.settings.setting import Raw

ON_ONE_MACHINE = {
    "main_address": "not needed on one machine",
    "main_port": "on one machine a free port is chosen",
}
"""Why a setting is not imported for one machine."""


class Imported(NamedTuple):
    """What an import changes in the profile, and what it cannot."""

    values: dict[str, Raw]
    not_imported: list[str]  # what has no counterpart here, a line for each
    reset: tuple[str, ...] = ()  # settings at their default there, to be removed from the profile
    their_names: Mapping[str, str] = MappingProxyType({})  # setting: what it is called there
    program: tuple[str, ...] = ()  # what follows `headway launch`
    lost: Sequence[str] = ()  # as not_imported, but training or its memory would be different
