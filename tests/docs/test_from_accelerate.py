"""The Python snippets of the page about Accelerate run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.docs.test_screens import ROOT

pytest.importorskip("torch")
pytest.importorskip("packaging")

PAGE = ROOT / "docs" / "from-accelerate.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_of_the_page_runs(snippet: str, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    runpy.run_path(str(script))
