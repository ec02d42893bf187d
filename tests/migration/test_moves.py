"""Scripts for Accelerate with only their imports changed: the same results, or a known reason."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

for package in ("accelerate", "transformers", "tensorboard", "torch"):
    if find_spec(package) is None:  # importorskip would import them, which takes seconds
        pytest.skip(f"could not find {package!r}", allow_module_level=True)

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "moves.py"
MOVES = runpy.run_path(str(BENCHMARK))
USUAL = ("schedule_of_epochs",)
SCRIPTS = sorted(MOVES["SCRIPTS"].glob("*.py"))
marked = [
    pytest.param(script, marks=() if script.stem in USUAL else pytest.mark.long, id=script.stem)
    for script in SCRIPTS
]


@pytest.mark.distributed
@pytest.mark.parametrize("script", marked)
def test_a_script_gives_the_same_results_or_there_is_a_reason(script: Any) -> None:
    words = [sys.executable, str(BENCHMARK), str(script), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=170, check=True)
    found = json.loads(done.stdout)
    assert [row["ranks"] for row in found] == [1, 2]
    for row in found:
        differing = {name for name in ("headway", "compat") if not is_same(row[name])}
        has_reason = script.stem in MOVES["WHY"]
        assert "headway" not in differing or has_reason, row
        assert "compat" not in differing or script.stem in MOVES["ALSO_WITH_COMPAT"], row


def is_same(difference: float | str) -> bool:
    return not isinstance(difference, str) and difference <= MOVES["TOLERANCE"]


def test_reasons_are_about_scripts_that_are_there() -> None:
    assert MOVES["ALSO_WITH_COMPAT"] <= set(MOVES["WHY"]) <= {script.stem for script in SCRIPTS}
    assert len(SCRIPTS) >= 12


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
    assert MOVES["difference"](expected, found) == difference
