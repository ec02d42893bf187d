"""Scripts for Accelerate with only their imports changed: the same results, or a known reason."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("tensorboard")
pytest.importorskip("torch")

from benchmarks import moves

USUAL = ("logger_and_state", "schedule_of_epochs")
SCRIPTS = sorted(moves.SCRIPTS.glob("*.py"))
marked = [
    pytest.param(one, marks=() if one.stem in USUAL else pytest.mark.long, id=one.stem)
    for one in SCRIPTS
]


@pytest.mark.distributed
@pytest.mark.parametrize("script", marked)
def test_a_script_gives_the_same_results_or_there_is_a_reason(script: Any) -> None:
    alone, together = moves.moves([script], [1, 2])
    for one in (alone, together):
        assert not isinstance(one.compat, str)
        assert one.compat <= moves.TOLERANCE
        if script.stem not in moves.WHY:
            assert not isinstance(one.headway, str)
            assert one.headway <= moves.TOLERANCE


def test_reasons_are_about_scripts_that_are_there() -> None:
    assert set(moves.WHY) <= {one.stem for one in SCRIPTS}
    assert len(SCRIPTS) >= 20


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.5]}, 0.5),
        ({"a": [1.0]}, {"a": [1.0, 2.0]}, "other a"),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, "other a.b"),
        ({"a": 1}, "Traceback ...\nValueError: x", "fails: ValueError: x"),
        ("Traceback ...\nValueError: x", {"a": 1}, "fails under Accelerate"),
        ({"a": float("nan")}, {"a": float("nan")}, 0.0),
        ({"a": float("nan")}, {"a": 1.0}, "other a"),
    ],
)
def test_the_largest_difference_is_found(expected: Any, found: Any, difference: Any) -> None:
    assert moves.difference(expected, found) == difference
