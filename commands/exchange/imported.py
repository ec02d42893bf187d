"""What another tool's configuration means here, whichever tool it is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from headway.settings.table import Raw

OF_SEVERAL = ("num_machines", "machine_rank", "main_address", "main_port")
"""The settings by which machines find each other; one machine needs none of them."""

ON_ONE_MACHINE = {
    "main_address": "one machine needs none",
    "main_port": "on one machine the system chooses it",
}
"""Why a setting is not taken over where there is one machine."""


class Imported(NamedTuple):
    """The settings that another tool's configuration stands for."""

    values: dict[str, Raw]
    not_imported: list[str]  # what has no counterpart here, a line for each
    reset: tuple[str, ...] = ()  # settings at their default there, to be removed from the profile
    their_names: Mapping[str, str] = MappingProxyType({})  # setting: what it is called there
    program: tuple[str, ...] = ()  # what follows `headway launch`
