"""An Accelerator works in a worker of another framework, such as Ray Train's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_an_accelerator_takes_the_process_group_that_a_framework_has_made(tmp_path: Path) -> None:
    seen = run_ranks(2, tmp_path, Path(__file__).with_name("foreign_worker.py"))
    assert not isinstance(seen, str), seen
    assert [rank["place"] for rank in seen] == [[0, 2], [1, 2]]
    assert sorted(seen[0]["samples"] + seen[1]["samples"]) == [float(n) for n in range(8)]
    assert seen[0]["weights"] == seen[1]["weights"]
