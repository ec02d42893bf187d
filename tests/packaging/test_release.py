"""`make release` begins only with a changelog that has a section for the version."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT

pytestmark = pytest.mark.processes


def test_a_release_without_a_section_in_the_changelog_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in (".ci/release", "headway/__init__.py", "headway/_version.py"):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, name)
    Path("CHANGELOG.md").write_text("# Changelog\n\n## 9.9.9 (unreleased)\n")
    command = [".ci/release", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert not Path("dist").exists()
