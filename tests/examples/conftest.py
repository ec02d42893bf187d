"""How launches start."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def warm_starts(warm_pythons: None) -> None:
    """Fork the launchers of examples."""
