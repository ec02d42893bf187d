"""`headway why` names what has changed since the last run that ended well."""

from __future__ import annotations

from typing import Any

import pytest

from headway.history.changes import changes
from headway.history.record import Commit
from headway.history.store import last_good, read_all
from tests.history.runs import START, SURROUNDINGS, write_run

CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a setting": ({"settings": {**START.settings, "mixed_precision": "bf16"}}, {}, "no -> bf16"),
    "an argument's value": (
        {"arguments": ("--lr", "0.3", "--data", "data")},
        {},
        "argument --lr: 0.1 -> 0.3",
    ),
    "a new argument": (
        {"arguments": (*START.arguments, "--compile")},
        {},
        "argument --compile: - -> set",
    ),
    "a variable": ({"variables": {"OMP_NUM_THREADS": "1"}}, {}, "OMP_NUM_THREADS: 4 -> 1"),
    "a variable of the script": (
        {"others": {"DATA_SEED": "00ab"}},
        {},
        "variable DATA_SEED: set -> another value",
    ),
    "fewer cores": ({"machine": {**START.machine, "cores": "2"}}, {}, "machine cores: 8 -> 2"),
    "another Python": ({"python": ("/opt/python",)}, {}, "/usr/bin/python3 -> /opt/python"),
    "a package": (
        {},
        {"packages": {"torch": "2.11.0", "numpy": "2.2.0"}},
        "package numpy: 2.1.0 -> 2.2.0",
    ),
    "a line of the script": (
        {},
        {"sources": {"train.py": "cc", "model.py": "bb"}, "text": "lr = 0.3\nepochs = 3\n"},
        "code train.py: there -> edited",
    ),
    "a module beside the script": (
        {},
        {"sources": {"train.py": "aa", "model.py": "dd"}},
        "code model.py: there -> edited",
    ),
    "a configuration beside the script": (
        {},
        {"sources": {**SURROUNDINGS.sources, "conf/model.yaml": "ee", "runs/1.yaml": "ff"}},
        "code conf/model.yaml: there -> edited",
    ),
    "what is in the data folder": (
        {},
        {"inputs": {"data": "/work/data: a folder of 3 entries, 80 bytes"}},
        "4 entries, 100 bytes -> /work/data: a folder of 3 entries",
    ),
    "where the data link leads": (
        {},
        {"inputs": {"data": "/other/data: a folder of 4 entries, 100 bytes"}},
        "-> /other/data",
    ),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_has_changed_is_named_and_nothing_else(what: str) -> None:
    start, found, said = CHANGED[what]
    good = write_run()
    bad = write_run(SURROUNDINGS._replace(**found), code=1, **start)
    (change,) = changes(good, bad)
    assert said in str(change)


def test_an_edited_line_is_shown_as_a_diff() -> None:
    good = write_run()
    edited = SURROUNDINGS._replace(sources={"train.py": "cc", "model.py": "bb"}, text="lr = 0.3\n")
    (change,) = changes(good, write_run(edited, code=1))
    assert {"-lr = 0.1", "-epochs = 3", "+lr = 0.3"} <= {*change.detail.splitlines()}


def test_another_commit_and_other_uncommitted_changes_are_named() -> None:
    diff = "diff --git a/src/net.py b/src/net.py\n@@ -1 +1 @@\n-width = 8\n+width = 16\n"
    before = write_run(Commit("/work", "a" * 40, diff))
    other_commit = Commit("/work", "b" * 40, diff)
    edited = Commit("/work", "a" * 40, diff.replace("16", "32"))
    (commit,) = changes(before, write_run(other_commit, code=1))
    assert str(commit) == "code commit: aaaaaaaaaaaa -> bbbbbbbbbbbb"
    (edit,) = changes(before, write_run(edited, code=1))
    assert str(edit) == "code src/net.py: there -> edited"
    assert "++width = 32" in edit.detail.splitlines()


def test_a_run_is_compared_with_the_last_one_of_its_script_that_ended_well() -> None:
    write_run()
    good = write_run()
    write_run(code=1)
    write_run(script="/work/other.py")
    bad = write_run(code=1)
    write_run()
    found = last_good(bad, read_all()[0])
    assert found is not None
    assert found.name == good.name


def test_each_flag_that_changed_is_told_apart_from_those_around_it() -> None:
    old = write_run(arguments=("data", "--mode", "a b", "--steps=10", "--shift", "-1"))
    new = write_run(
        arguments=("data", "--steps", "20", "--lr", "0.2", "--mode", "c", "--shift", "-1")
    )
    assert [str(one) for one in changes(old, new)] == [
        "argument --mode: a b -> c",
        "argument --steps: 10 -> 20",
        "argument --lr: - -> 0.2",
    ]


def test_a_script_that_became_a_rank_is_told_so() -> None:
    alone, rank, older = (write_run(is_rank=one) for one in (False, True, None))
    assert [str(one) for one in changes(alone, rank)] == [
        "variable RANK, LOCAL_RANK, ...: - -> set by the launcher"
    ]
    (gone,) = changes(rank, alone)
    assert gone.after == "-"
    assert not changes(older, rank)


def test_another_order_of_the_same_flags_is_told() -> None:
    old, new = write_run(arguments=("--a", "--b")), write_run(arguments=("--b", "--a"))
    assert [str(one) for one in changes(old, new)] == ["argument as typed: --a --b -> --b --a"]
