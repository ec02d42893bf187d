"""The examples and the scripts of the pages are followed to their second step."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.estimate.attempt import FAKE
from tests.docs.test_site import blocks
from tests.estimate.following import ROOT, Server

pytestmark = pytest.mark.processes

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [(page, text) for page, text in blocks("python") if "optimizer.step()" in text]


def test_each_example_and_each_script_of_the_pages_is_followed(server: Server) -> None:
    assert len(EXAMPLES) >= 9
    assert len(PAGES) >= 5
    scripts = [*EXAMPLES]
    for number, (page, text) in enumerate(PAGES):
        scripts.append(Path(f"{number}_{page}.py"))
        scripts[-1].write_text(text)
    for one in scripts:
        outcome = server.follow(one)
        assert (outcome.rung, outcome.failed_at) == (FAKE, ""), one
        assert outcome.steps == 2, one
