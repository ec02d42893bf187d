"""A checkpoint of another user is loaded where permissions allow it; else it is named as closed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.another_user import needs_root
from tests.conftest import REPOSITORY
from tests.distributed.launching import environment

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, needs_root]
ALLOWED = ("open", "of a group")
CLOSED = {  # what is named
    "closed": "manifest.json",
    "of another group": "manifest.json",
    "closed tensors": "tensors/",
    "closed files": "manifest.json",
}


@pytest.fixture
def shared_folder(own_temporary_folder: Path) -> Iterator[Path]:
    """A folder that every user may look into; pytest's own is for its user alone."""
    own_temporary_folder.chmod(0o755)
    folder = own_temporary_folder / "shared"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


def test_another_user_loads_what_it_may_read_and_is_told_what_it_may_not(
    shared_folder: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.other_user", str(shared_folder)],
        env=environment(
            OMP_NUM_THREADS="1", HOME=str(shared_folder), XDG_CONFIG_HOME=str(shared_folder)
        ),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    for name in ALLOWED:
        assert seen["load"][name] == "loaded"
        assert seen["launch"][name].startswith("0 ")
    for name, named in CLOSED.items():
        error = seen["load"][name]
        assert f"{seen['paths'][name]}/{named}" in error
        assert "Permission denied" in error
        assert "damaged" not in error
        if named == "manifest.json":  # a launch looks at no other file
            assert seen["paths"][name] in seen["launch"][name]
            assert "Permission denied" in seen["launch"][name]
    newest = seen["paths"]["closed files"]
    assert newest in seen["resume"], "it is not passed over"
    assert "Permission denied" in seen["resume"]
    assert seen["states"] == {
        path: "complete" if name in ALLOWED else "closed" for name, path in seen["paths"].items()
    }
