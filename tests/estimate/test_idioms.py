"""Idioms of ordinary scripts: nearly all are followed, and the others say where they were not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.estimate.following import Server

pytestmark = pytest.mark.processes

FOLDER = Path(__file__).parent / "idioms"
QUICK = 10  # every so many-th is tried in the short form
FEWEST, FEWEST_FOLLOWED = 76, 70


class Idiom(NamedTuple):
    kind: str
    name: str
    text: str


def idioms() -> list[Idiom]:
    """Return the scripts: each cell of a file, after what all its cells begin with."""
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        prelude, *cells = re.split(r"^# %% ", path.read_text(), flags=re.MULTILINE)
        for cell in cells:
            name, _, body = cell.partition("\n")
            found.append(Idiom(path.stem, name, prelude + body))
    return found


IDIOMS = idioms()


def unfollowed(chosen: list[Idiom], server: Server) -> list[str]:
    """Return the names of those that end on a lower rung; each has to name the line."""
    found = []
    for number, idiom in enumerate(chosen):
        path = Path(f"{idiom.kind}_{number}.py")
        path.write_text(idiom.text)
        device = "cuda" if "on a GPU" in idiom.name or idiom.kind == "gpus" else "cpu"
        outcome = server.follow(path, device=device)
        if outcome.rung == "fake tensors":
            assert outcome.steps >= 2, (idiom.name, outcome)
            assert outcome.categories["parameters"] > 0, (idiom.name, outcome)
            assert not outcome.failed_at, (idiom.name, outcome)
        else:
            assert f"{path}, line " in outcome.failed_at, (idiom.name, outcome)
            found.append(f"{idiom.kind}: {idiom.name}: {outcome.failed_at}")
    return found


def test_idioms_of_each_kind_are_followed(server: Server) -> None:
    followed = [one for one in IDIOMS if one.kind not in ("hard", "libraries")]
    assert not unfollowed(followed[::QUICK], server)


def test_the_accelerator_of_torch_is_the_gpu_that_is_asked_for(server: Server) -> None:
    chosen = [one for one in IDIOMS if one.name.startswith("the accelerator of torch")]
    assert len(chosen) == 1
    assert not unfollowed(chosen, server)


def test_a_script_that_cannot_be_followed_names_its_line_and_its_states(server: Server) -> None:
    hard = [one for one in IDIOMS if one.kind == "hard"]
    assert len(unfollowed(hard, server)) == len(hard)


@pytest.mark.long
def test_nearly_all_idioms_are_followed(server: Server) -> None:
    failed = unfollowed(IDIOMS, server)
    print(*failed, sep="\n")
    assert len(IDIOMS) >= FEWEST
    assert len(IDIOMS) - len(failed) >= FEWEST_FOLLOWED, failed
