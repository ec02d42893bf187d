"""What ranks without a launcher saw, for all tests that look at it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.distributed.ranks import Seen, run_ranks


@pytest.fixture(scope="session")
def seen_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Seen]:
    """Return a function that starts so many ranks (once) and returns what each of them saw."""

    @cache
    def outcome(world: int) -> Seen | str:
        return run_ranks(world, tmp_path_factory.mktemp("ranks"))

    def seen(world: int) -> Seen:
        found = outcome(world)
        assert not isinstance(found, str), found
        return found

    return seen
