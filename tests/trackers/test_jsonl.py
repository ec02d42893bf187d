"""The built-in tracker and its file."""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.errors import ConfigError
from headway.trackers.jsonl import JsonlTracker
from headway.trackers.run_file import is_run, read_metrics
from tests.trackers.full_disk import no_file_above


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[JsonlTracker]:
    made = JsonlTracker("project", tmp_path / "runs")
    made.start()
    yield made
    made.finish()


def strict_lines(tracker: JsonlTracker) -> list[Any]:
    """Return the objects in a file that must be JSON as RFC 8259 has it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = tracker.path.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_run_is_one_file_with_its_config_in_the_first_line(tracker: JsonlTracker) -> None:
    tracker.store_init_configuration({"lr": 0.1, "layers": [1, 2], "path": Path("a")})
    before = time.time()
    tracker.log({"loss": 0.5}, step=10)
    head, line = strict_lines(tracker)
    assert head["project"] == "project"
    assert head["config"] == {"lr": 0.1, "layers": [1, 2], "path": "a"}
    assert (line["step"], line["values"]) == (10, {"loss": 0.5})
    assert line["time"] == pytest.approx(before, abs=60)
    assert is_run(tracker.path)


def test_a_run_without_config_and_one_with_a_later_one_are_runs(tracker: JsonlTracker) -> None:
    tracker.log({"loss": 1})
    tracker.store_init_configuration({"lr": 0.1})
    head, _, last = strict_lines(tracker)
    assert (head["config"], last["config"]) == ({}, {"lr": 0.1})


def test_values_of_all_kinds_become_json(tracker: JsonlTracker) -> None:
    config: dict[Any, Any] = {
        "nan": math.nan,
        3: {("a", 1): Namespace(b=2)},
        "dtype": torch.bfloat16,
    }
    tracker.store_init_configuration(config)
    values = {
        "tensor": torch.tensor(0.5, requires_grad=True),
        "one": torch.tensor([2]),
        "numpy": np.float32(0.5),
        "integer": np.int64(3),
        "bool": True,
        "train": {"loss": torch.tensor(1.5), "deep": {"x": 1}},
        "text": "a\nb \udc80 ü",
        "vector": torch.tensor([1.0, math.nan]),
        "image": torch.zeros(3, 32, 32),
        "none": None,
        "nan": math.nan,
        "inf": -math.inf,
    }
    tracker.log(values, step=np.int64(7))  # type: ignore[arg-type]
    head, line = strict_lines(tracker)
    assert head["config"]["3"]["('a', 1)"] == "Namespace(b=2)"
    found = line["values"]
    assert line["step"] == 7
    assert (found["tensor"], found["one"], found["numpy"], found["integer"]) == (0.5, 2, 0.5, 3)
    assert (found["train/loss"], found["train/deep/x"], found["bool"]) == (1.5, 1, True)
    assert (found["vector"], found["nan"], found["inf"]) == ([1, "NaN"], "NaN", "-Infinity")
    assert len(str(found["image"])) < 1000
    metrics = read_metrics(tracker.path)
    assert math.isnan(metrics["nan"].values[0])
    assert metrics["inf"].values == [-math.inf]
    assert metrics["bool"].values == [1]
    assert not {"text", "none", "vector"} & metrics.keys()


def test_a_call_without_a_step_counts_one_on(tracker: JsonlTracker) -> None:
    for step in (None, None, 10, None):
        tracker.log({"loss": 1}, step=step)
    assert read_metrics(tracker.path)["loss"].steps == [0, 1, 10, 11]


def test_torn_lines_are_left_out(tracker: JsonlTracker) -> None:
    tracker.log({"loss": 1}, step=1)
    with tracker.path.open("ab") as file:
        file.write(b'{"step":2,"values":{"lo\n\xff\n[]\n{"step":3,"values":{"loss":3}}\n{"st')
    assert read_metrics(tracker.path) == {"loss": ([1, 3], [1, 3])}


@pytest.mark.parametrize("odd", ["null", "[1]", '"a"', "1" + "0" * 400])
def test_a_line_that_no_tracker_wrote_is_left_out(odd: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(
        f'{{"headway_run":1}}\n{{"step":{odd},"values":{{"loss":1}}}}\n{{"step":1,"values":{odd}}}\n'
        '{"step":NaN,"values":{"\\u001b[1m":1}}\n{"step":9,"values":{"loss":2}}\n'
    )
    metrics = read_metrics(path)
    assert metrics["loss"].values == [1, 2]
    assert metrics["loss"].steps[1] == 9
    assert all(math.isfinite(step) for metric in metrics.values() for step in metric.steps)
    assert all(map(str.isprintable, metrics))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    for text in ("", "{}", "no", '{"headway_run":99}'):
        other.write_text(text)
        with pytest.raises(ConfigError):
            read_metrics(other)
    with pytest.raises(ConfigError):
        read_metrics(tmp_path / "none.jsonl")
    assert not is_run(tmp_path / "none.jsonl")


def test_runs_of_one_second_have_files_of_their_own(tmp_path: Path) -> None:
    made = [JsonlTracker("a/b", tmp_path) for _ in range(3)]
    for tracker in made:
        tracker.start()
        tracker.finish()
    assert len({tracker.path for tracker in made}) == 3
    assert all(is_run(tracker.path) for tracker in made)


def test_after_a_disk_was_full_lines_are_whole_again(tracker: JsonlTracker) -> None:
    tracker.log({"loss": 1}, step=1)
    size = tracker.path.stat().st_size
    with no_file_above(size + 20):  # the next line fits in part, the one after it not at all
        for step in (2, 3):
            with pytest.raises(OSError, match=r"File too large|No space"):
                tracker.log({"loss": step}, step=step)
    tracker.log({"loss": 4}, step=4)
    assert read_metrics(tracker.path)["loss"].steps == [1, 4]
