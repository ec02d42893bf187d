"""`headway plot`: what it draws of runs, and what it refuses."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.commands.plot import Chart, Curve, draw_chart, number, ticks_between
from tests.commands.running import run


def write_run(path: Path, *calls: dict[str, Any], **config: Any) -> Path:
    """Write the file of a run in which every call has the step of its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"headway_run": 1, "project": "project", "time": 1.0, "config": config}
    lines = [{"step": step, "time": 2.0, "values": values} for step, values in enumerate(calls)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    return path


def losses(count: int) -> list[dict[str, Any]]:
    return [{"loss": math.exp(-step / count), "train/lr": 0.1} for step in range(count)]


def width_of(text: str) -> int:
    return max(map(len, text.splitlines()))


@pytest.mark.parametrize("columns", [10, 40, 100])
def test_a_run_is_drawn_in_the_width_of_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotext")
    monkeypatch.setenv("COLUMNS", str(columns))
    path = write_run(Path("run.jsonl"), *losses(5000))
    code, text = run("plot", str(path), "--metrics", "loss")
    assert code == 0
    assert "\x1b" not in text
    chart = "\n".join(line for line in text.splitlines() if line[-1:] in "│┘┐")
    assert width_of(chart) == max(columns, 24)
    assert "last 0.368 at step 4999" in text
    assert "train/lr" not in text


def test_a_folder_is_its_newest_run_and_wildcards_choose_metrics() -> None:
    pytest.importorskip("plotext")
    write_run(Path("runs/a/old.jsonl"), {"old": 1})
    new = write_run(Path("runs/b/new.jsonl"), *losses(3))
    Path("runs/z.jsonl").write_text("{}\n")
    for age, name in enumerate(("runs/z.jsonl", "runs/b/new.jsonl", "runs/a/old.jsonl")):
        os.utime(name, (1000 - age, 1000 - age))
    code, text = run("plot", "runs", "--metrics", "train/*")
    assert (code, text.splitlines()[0]) == (0, str(new))
    assert "lr" in text
    assert "loss" not in text


def test_runs_are_compared_with_a_marker_for_each() -> None:
    pytest.importorskip("plotext")
    first = write_run(Path("a/first.jsonl"), *losses(3), lr=0.1, seed=1)
    calls = {"loss": 3.0}, {"loss": "NaN"}, {"loss": 1.0}
    second = write_run(Path("a/second.jsonl"), *calls, lr=0.2, seed=1)
    code, text = run("plot", str(first), str(second), str(first))
    assert code == 0
    assert "o first (lr=0.1): last" in text
    assert (
        "x second (lr=0.2): last 1 at step 2; lowest 1 at 2; highest 3 at 0; 1 not finite" in text
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.5], "last 0.5 at step 0"),
        ([0.5, 0.5], "last 0.5 at step 1"),
        ([math.nan, math.inf], "no finite value; 2 not finite"),
        ([1e-12, 1e12], "highest 1e+12"),
        ([-3, math.nan, 5e-324], "1 not finite"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_odd_curves_are_drawn(values: Sequence[float], said: str, encoding: str) -> None:
    pytest.importorskip("plotext")
    curve = Curve("run", range(len(values)), values)
    text = draw_chart(Chart("loss", [curve]), 60, encoding)
    assert said in text
    text.encode(encoding)


def test_thousands_of_points_keep_their_peaks() -> None:
    values = [0.0] * 100_000
    values[777], values[99_000] = 5.0, -5.0
    thin = Curve("run", range(len(values)), values).thinned(100)
    assert len(thin.values) <= 200
    assert (max(thin.values), min(thin.values)) == (5.0, -5.0)
    assert list(thin.steps) == sorted(thin.steps)


def test_ticks_are_round_numbers() -> None:
    assert list(map(number, ticks_between(0, 5000, 5))) == [
        "0",
        "1000",
        "2000",
        "3000",
        "4000",
        "5000",
    ]
    assert list(map(number, ticks_between(0.12, 0.71, 3))) == ["0.2", "0.4", "0.6"]
    assert ticks_between(3, 3, 5) == [3]


@pytest.mark.processes  # matplotlib asks fc-list for its fonts
@pytest.mark.parametrize("name", ["loss.png", "loss.svg"])
def test_a_picture_is_written(name: str) -> None:
    pytest.importorskip("matplotlib")
    calls = [*losses(3), {"loss": "NaN"}, {"loss": "Infinity", "$x_": 1}, {"loss": 1e308}]
    first, second = write_run(Path("_a.jsonl"), *calls), write_run(Path("b.jsonl"), *losses(2000))
    assert run("plot", str(first), str(second), "--output", name) == (0, f"{name}\n")
    begin = Path(name).read_bytes()[:200]
    assert begin.startswith(b"\x89PNG") or b"<?xml" in begin


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nowhere"],
        ["."],
        ["text.jsonl"],
        ["run.jsonl", "--metrics", "lsos"],
        ["run.jsonl", "--output", "loss.xyz"],
        ["run.jsonl", "--output", "loss"],
        ["run.jsonl", "--output", "no/folder/loss.png"],
        ["empty.jsonl"],
    ],
)
def test_what_cannot_be_drawn_is_refused(words: list[str]) -> None:
    pytest.importorskip("plotext")
    pytest.importorskip("matplotlib")
    if words != ["."]:
        write_run(Path("run.jsonl"), *losses(3))
        write_run(Path("empty.jsonl"), {"text": "a"})
    Path("text.jsonl").write_text("a\n")
    code, text = run("plot", *words)
    assert code == 2
    assert "fix:" in text


@pytest.mark.parametrize("words", [["run.jsonl"], ["run.jsonl", "--output", "x.png"]])
def test_what_is_not_installed_is_named(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.commands.plot.find_spec", lambda name: None)
    write_run(Path("run.jsonl"), *losses(3))
    code, text = run("plot", *words)
    assert code == 3
    assert "headway[plot]" in text


def test_damaged_lines_are_told() -> None:
    pytest.importorskip("plotext")
    path = write_run(Path("run.jsonl"), *losses(3))
    with path.open("a") as file:
        file.write('{"step": 4, "val')
    code, text = run("plot", str(path))
    assert code == 0
    assert "1 damaged line" in text
