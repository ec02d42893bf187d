"""Separates the store keys of default process groups that a process creates one after another, and
notes that there was one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from headway.contract.records import channel


def keep_groups_apart(c10d: ModuleType) -> None:
    """Give every default group after the first its own key prefix in the launcher's store.

    torch names them all `default_pg/0`, and the store outlives them: a rank that creates the second
    group early reads the address of its peer in the first one, and cannot connect. Counts only
    groups that were created, with a store that torch found itself (`init_method`).

    Relies on two private names in `c10d`, which is torch.distributed.distributed_c10d:
    `init_process_group` asks `rendezvous` for the store, then `_new_process_group_helper`
    creates the group.
    """
    if getattr(c10d.rendezvous, "keeps_groups_apart", False):
        return
    find, make = c10d.rendezvous, c10d._new_process_group_helper
    formed, is_forming = 0, False

    @functools.wraps(find)
    def find_apart(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        nonlocal is_forming
        for store, rank, size in find(*args, **kwargs):
            is_forming = True
            yield c10d.PrefixStore(f"group_{formed}", store) if formed else store, rank, size

    @functools.wraps(make)
    def make_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal formed, is_forming
        channel.has_joined_group = True
        made = make(*args, **kwargs)
        formed, is_forming = formed + is_forming, False
        return made

    find_apart.keeps_groups_apart = True  # type: ignore[attr-defined]
    c10d.rendezvous = find_apart  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make_and_count  # type: ignore[attr-defined]
