"""One child that has imported torch, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.estimate.following import Follow, follower


@pytest.fixture(scope="module")
def follow(warm_pythons: None) -> Iterator[Follow]:
    pytest.importorskip("torch")
    with follower() as follow:
        yield follow
