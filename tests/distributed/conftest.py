"""How launches start, and where ranks without a launcher work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed import in_ranks
from tests.distributed.launching import executed


@pytest.fixture(scope="session", autouse=True)
def warm_starts(warm_pythons: None) -> None:
    """Fork what the tests start, where nothing depends on how it starts."""


@pytest.fixture
def executed_starts() -> Iterator[None]:
    """Execute what the test starts, because how it starts, or what it is, matters."""
    with executed():
        yield


@pytest.fixture(scope="session", autouse=True)
def folder_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    in_ranks.set_root(tmp_path_factory.mktemp("ranks"))
