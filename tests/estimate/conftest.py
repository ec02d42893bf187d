"""One child that has imported torch, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.estimate.following import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("torch")
    with Server() as server:
        yield server
