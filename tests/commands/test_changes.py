"""`headway why` names what has changed since the last run that ended well."""

from __future__ import annotations

from typing import Any

import pytest

from headway.commands.changes import changes
from headway.history.record import last_successful, read_all
from tests.history.runs import COMMIT, EDIT, PACKAGES, START, write_run

EDITED = COMMIT._replace(diff=EDIT.replace("16", "32"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"settings": {**START.settings, "mixed_precision": "bf16"}}, "no -> bf16"),
        ({"arguments": ("--lr", "0.3", "--data", "data")}, "argument --lr: 0.1 -> 0.3"),
        ({"arguments": (*START.arguments, "--compile")}, "argument --compile: - -> set"),
        ({"variables": {"OMP_NUM_THREADS": "1"}}, "OMP_NUM_THREADS: 4 -> 1"),
        ({"machine": {**START.machine, "cores": "2"}}, "machine cores: 8 -> 2"),
        ({"python": ("/opt/python",)}, "/usr/bin/python3 -> /opt/python"),
        ({"folder": "/home"}, "launch working folder: /work -> /home"),
        ({"packages": {**PACKAGES, "numpy": "2.2.0"}}, "package numpy: 2.1.0 -> 2.2.0"),
        ({"is_rank": True}, "launch as a rank, with RANK, LOCAL_RANK, ...: no -> yes"),
        ({"commit": COMMIT._replace(commit="b" * 40)}, "code commit: aaaaaaaaaaaa -> bbbbbbbbbbbb"),
        ({"commit": EDITED}, "code net.py: edited -> edited differently"),
        ({"commit": COMMIT._replace(diff="")}, "code net.py: edited -> as committed"),
        # git was too slow for the diff
        ({"commit": COMMIT._replace(diff=None)}, "uncommitted changes: not known -> not known"),
    ],
)
def test_what_has_changed_is_named_and_nothing_else(changed: dict[str, Any], said: str) -> None:
    (change,) = changes(write_run(), write_run(1, **changed))
    assert said in str(change)


def test_an_edited_line_is_shown_as_a_diff() -> None:
    clean = COMMIT._replace(diff="")
    (change,) = changes(write_run(commit=clean), write_run(1))
    assert change.detail.splitlines() == ["@@ -1 +1 @@", "-width = 8", "+width = 16"]
    (change,) = changes(write_run(), write_run(1, commit=EDITED))
    assert "+width = 32" in change.detail.splitlines()


def test_a_run_is_compared_with_the_last_one_of_its_script_that_ended_well() -> None:
    write_run()
    good = write_run()
    write_run(1)
    write_run(script="/work/other.py")
    bad = write_run(1)
    write_run()
    found = last_successful(bad, read_all()[0])
    assert found is not None
    assert found.name == good.name


def test_what_has_changed_among_the_arguments_is_told_flag_by_flag() -> None:
    old = ("data", "--mode", "a b", "--steps=10", "--shift", "-1")
    new = ("data", "--steps", "20", "--lr", "0.2", "--mode", "c", "--shift", "-1")
    assert [str(c) for c in changes(write_run(arguments=old), write_run(arguments=new))] == [
        "argument --mode: a b -> c",
        "argument --steps: 10 -> 20",
        "argument --lr: - -> 0.2",
    ]
