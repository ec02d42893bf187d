"""How launches start, and what ranks without a launcher saw, for all tests that look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.distributed.launching import executed
from tests.distributed.ranks import Seen, run_ranks


@pytest.fixture(scope="session", autouse=True)
def warm_starts(warm_pythons: None) -> None:
    """Fork what the tests start, where nothing depends on how it starts."""


@pytest.fixture
def executed_starts() -> Iterator[None]:
    """Execute what the test starts, because how it starts, or what it is, matters."""
    with executed():
        yield


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
