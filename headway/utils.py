"""The names that scripts import from `accelerate.utils`; nothing is defined here."""

from __future__ import annotations

import typing

from headway.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
)
from headway.seeding import set_seed
from headway.world import DistributedType

__all__ = [
    "DistributedType",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "send_to_device",
    "set_seed",
]

if not typing.TYPE_CHECKING:  # a type checker knows every name that is here

    def __getattr__(name: str) -> typing.NoReturn:
        from headway.migration.missing import raise_missing

        raise_missing("utils", name, __name__)
