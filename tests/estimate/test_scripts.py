"""Ordinary scripts are followed: idioms, the examples, and the scripts of the pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.test_site import blocks
from tests.estimate.following import ROOT, Follow

pytestmark = pytest.mark.processes

QUICK = 10  # every so many-th idiom is tried in the short form


class Idiom(NamedTuple):
    kind: str
    name: str
    text: str


def idioms() -> list[Idiom]:
    """Return the scripts: each cell of a file, after what all its cells begin with."""
    found = []
    for path in sorted(Path(__file__).with_name("idioms").glob("*.py")):
        prelude, *cells = re.split(r"^# %% ", path.read_text(), flags=re.MULTILINE)
        for cell in cells:
            name, _, body = cell.partition("\n")
            found.append(Idiom(path.stem, name, prelude + body))
    return found


IDIOMS = idioms()


def unfollowed(chosen: list[Idiom], follow: Follow) -> list[str]:
    """Return the names of those that are not followed to their end; each has to name the line."""
    found = []
    for number, idiom in enumerate(chosen):
        path = Path(f"{idiom.kind}_{number}.py")
        path.write_text(idiom.text)
        device = "cuda" if "on a GPU" in idiom.name or idiom.kind == "gpus" else "cpu"
        outcome = follow(path, device=device)
        if not outcome.failed_at:
            assert outcome.steps >= 2, (idiom.name, outcome)
            assert outcome.categories["parameters"] > 0, (idiom.name, outcome)
        else:
            assert f"{path}, line " in outcome.failed_at, (idiom.name, outcome)
            found.append(f"{idiom.kind}: {idiom.name}: {outcome.failed_at}")
    return found


def test_idioms_of_each_kind_are_followed(follow: Follow) -> None:
    followed = [one for one in IDIOMS if one.kind not in ("hard", "libraries")]
    named = [
        one for one in IDIOMS if one.name.startswith(("the accelerator of", "prepared workers"))
    ]
    assert not unfollowed(followed[::QUICK] + named, follow)


def test_a_script_that_cannot_be_followed_names_its_line(follow: Follow) -> None:
    hard = [one for one in IDIOMS if one.kind == "hard"]
    assert len(unfollowed(hard, follow)) == len(hard)


@pytest.mark.long
def test_all_idioms_but_the_hard_ones_are_followed(follow: Follow) -> None:
    failed = unfollowed([one for one in IDIOMS if one.kind != "hard"], follow)
    assert not [one for one in failed if "ModuleNotFoundError" not in one]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_each_example_and_each_script_of_the_pages_is_followed(follow: Follow, every: int) -> None:
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert len(scripts) >= 9
    pages = [(page, text) for page, text in blocks("python") if "optimizer.step()" in text]
    assert len(pages) >= 5
    for number, (page, text) in enumerate(pages):
        scripts.append(Path(f"{number}_{page}.py"))
        scripts[-1].write_text(text)
    for one in scripts[::every]:
        outcome = follow(one)
        assert (outcome.failed_at, outcome.steps) == ("", 2), one
