"""The file format of the `jsonl` tracker, and its reader.

Each line is a JSON object. The first is {"headway_run": 1, "project", "time", "config"}; the others
are {"step", "time", "values"} for a call to `log`, {"time", "config"} for a later configuration,
or {"time", "resumed"} when the run resumes from a checkpoint. The lines that follow a "resumed"
line replace earlier lines for the same or later steps.
Times are seconds since 1970. NaN and infinities are written as in protobuf's JSON mapping
(https://protobuf.dev/programming-guides/json/): "NaN", "Infinity", "-Infinity".
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from headway.errors import Code, ConfigError
from headway.ipc.stderr import shown

MARK = "headway_run"
VERSION = 1
RESUMED = "resumed"
SUFFIX = ".jsonl"
_MOST_NUMBERS = 1000  # maximum elements of an array that is written as a list
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def line_of(fields: dict[str, Any]) -> bytes:
    """Encode `fields` as a line; values that JSON does not support become strings."""
    try:
        text = _encode(fields)
    except (ValueError, TypeError):  # a non-finite number, or a key that is not a string
        text = _encode(_writable(fields))
    return text.encode(errors="backslashreplace") + b"\n"


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array or a tensor
        return value.tolist() if math.prod(value.shape) <= _MOST_NUMBERS else str(value)
    return str(value)


_encode = json.JSONEncoder(
    separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_as_json
).encode


def _writable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _writable(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int, float)):
        return value
    return _writable(_as_json(value))


class MetricSeries(NamedTuple):
    """A metric in a run: its steps, and its values, which may be NaN or infinite."""

    steps: list[float]
    values: list[float]


def is_run(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return MARK in _object_in(file.readline())
    except OSError:
        return False


def read_metrics(path: Path) -> dict[str, MetricSeries]:
    """Return the metrics of a run by name, in the order of their first values.

    The run may still be writing to the file; partial lines are skipped. A call to `log` without a
    step gets the previous call's step plus 1.
    """
    try:
        head, *lines = map(_object_in, path.read_bytes().split(b"\n"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            where=str(path),
            fix="pass another run",
            code=Code.UNREADABLE,
        ) from None
    if head.get(MARK) != VERSION:
        raise ConfigError(
            f"{path} is not a jsonl tracker file in format version {VERSION}",
            where=str(path),
            fix='pass a file written by this version of `Accelerator(log_with="jsonl")`',
            code=Code.UNREADABLE,
        )
    metrics: dict[str, MetricSeries] = {}
    step = -1.0
    replaced: set[str] = set()  # metrics not logged since the run resumed
    for line in lines:
        if RESUMED in line:
            replaced = {*metrics}
        if "values" not in line:
            continue
        given = _number(line.get("step"))
        step = step + 1 if given is None or not math.isfinite(given) else given
        for name, value in line["values"].items():
            number = _number(value)
            if number is None:
                continue
            series = metrics.setdefault(shown(name), MetricSeries([], []))
            if shown(name) in replaced:
                replaced.remove(shown(name))
                while series.steps and series.steps[-1] >= step:
                    series.steps.pop()
                    series.values.pop()
            series.steps.append(step)
            series.values.append(number)
    return metrics


def _object_in(line: bytes) -> dict[str, Any]:
    """Parse the object in a line; return an empty dict for a partial line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    is_line = isinstance(found, dict) and isinstance(found.get("values", {}), dict)
    return found if is_line else {}


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return math.inf if value > 0 else -math.inf
