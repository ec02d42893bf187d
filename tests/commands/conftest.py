"""A profile of this user's, for tests that change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.settings.profile import choose_profile

PROFILE = """\
# for the big machine
device: cpu   # not the GPU
num_processes: 2
env: {A: 1}
"""


@pytest.fixture
def profile() -> Path:
    path = Path(choose_profile().path)
    path.parent.mkdir(parents=True)
    path.write_text(PROFILE)
    return path
