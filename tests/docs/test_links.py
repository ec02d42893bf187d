"""Links and paths in README, CONTRIBUTING and the pages lead somewhere, also without the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_screens import ROOT, screens

OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:[\w-]+/)+(?!NAME\.)[\w-]+\.(?:py|md|ipynb|txt|svg))`")
TOP = (
    "headway",
    "launcher",
    "commands",
    "config_wizard",
    "docs",
    "examples",
    "benchmarks",
    "tests",
)


def files() -> list[str]:
    """Return the paths of all files of the tree, from its root and with a slash before it."""
    found = (one for top in TOP for one in (ROOT / top).rglob("*.*"))
    return [f"/{one.relative_to(ROOT).as_posix()}" for one in found]


def anchors(page: Path) -> set[str]:
    """Return the fragments of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", [*OUTSIDE, *screens.PAGES], ids=lambda page: page.name)
def test_links_lead_to_files_of_the_tree_and_to_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_files_that_pages_name_are_there() -> None:
    there = files()
    for page in (*OUTSIDE, *screens.PAGES):
        for named in NAMED.findall(page.read_text()):
            assert any(one.endswith(f"/{named}") for one in there), f"{page.name}: {named}"
