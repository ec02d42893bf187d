"""The option `--reworded` of pytest; tests of wording are left out under it."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

SITE = Path(__file__).parent / "site"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reworded", action="store_true", help="with every message in other words (tests/reworded)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--reworded"):
        runpy.run_path(str(SITE / "sitecustomize.py"))
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{SITE}{os.pathsep}{path}" if path else str(SITE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--reworded"):
        return
    wording = [item for item in items if "wording" in item.keywords]
    config.hook.pytest_deselected(items=wording)
    items[:] = [item for item in items if "wording" not in item.keywords]
