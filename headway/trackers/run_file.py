"""The file of one run, which the `jsonl` tracker writes: its lines, and how they are read.

One JSON object a line. The first is {"headway_run": 1, "project", "time", "config"}, each other
one {"step", "time", "values"} of one call of `log`, or {"time", "config"} of a later configuration,
or {"time", "goes_on"}: the run goes on from a checkpoint, and what it logs from here on replaces
what was logged for the same steps and later ones.
Times are seconds since 1970. NaN and the infinities are the texts of protobuf's JSON mapping
(https://protobuf.dev/programming-guides/json/): "NaN", "Infinity", "-Infinity".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headway.contract.records import shown
from headway.errors import ConfigError

MARK = "headway_run"
VERSION = 1
GOES_ON = "goes_on"
SUFFIX = ".jsonl"
_MOST_NUMBERS = 1000  # of an array or tensor, written one by one
_MOST_STEPS = 2**63
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def line_of(fields: dict[str, Any]) -> bytes:
    """Return the line of `fields`; what JSON does not have is written as its text."""
    try:
        text = _encode(fields)
    except (ValueError, TypeError):  # a number that is not finite, a key that is no text
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
        return {str(name): _writable(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int, float)):
        return value
    return _writable(_as_json(value))


class Series(NamedTuple):
    """One metric of a run: its values, and the step of each. Values may be NaN or infinite."""

    steps: list[float]
    values: list[float]


class Run(NamedTuple):
    """What the file of a run says."""

    path: Path
    project: str
    began_at: float  # seconds since 1970
    config: dict[str, Any]
    metrics: dict[str, Series]  # those with numbers, in the order in which they appeared
    damaged_lines: int  # not written whole, or no JSON; they are left out


def is_run(path: Path) -> bool:
    """Return whether a file begins as that of a run does."""
    try:
        with path.open("rb") as file:
            head = _object_in(file.readline())
    except OSError:
        return False
    return head is not None and MARK in head


def read_run_file(path: Path) -> Run:
    """Read the file of a run, also while it is being written.

    A call of `log` without a step has the step after the one of the call before it.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", where=str(path), fix="name another run"
        ) from None
    head = _object_in(lines[0])
    _check_head(path, head)
    assert head is not None
    objects = [_object_in(line) for line in lines[1:] if line.strip()]
    config = dict(head.get("config") or {})
    metrics: dict[str, Series] = {}
    step = -1.0
    goes_on: set[str] = set()  # metrics that have not been logged since the run goes on
    for one in objects:
        if one is None:
            continue
        if GOES_ON in one:
            goes_on = {*metrics}
        config |= one.get("config") or {}
        if "values" in one:
            given = _float(one.get("step"))
            step = given if abs(given) < _MOST_STEPS else step + 1
            for name, value in _numbers_in(one["values"]):
                series = metrics.setdefault(name, Series([], []))
                if name in goes_on:
                    goes_on.remove(name)
                    _cut(series, step)
                series.steps.append(step)
                series.values.append(value)
    return Run(
        path=path,
        project=shown(str(head.get("project", ""))),
        began_at=_float(head.get("time")),
        config=config,
        metrics=metrics,
        damaged_lines=objects.count(None),
    )


def _cut(series: Series, step: float) -> None:
    """Remove what was logged for a step and later ones."""
    while series.steps and series.steps[-1] >= step:
        series.steps.pop()
        series.values.pop()


def _check_head(path: Path, head: dict[str, Any] | None) -> None:
    version = None if head is None else head.get(MARK)
    if version == VERSION:
        return
    raise ConfigError(
        f"{path} is not a run of the jsonl tracker"
        if version is None
        else f"{path} has version {shown(str(version))} of the format, and this Headway reads"
        f" {VERSION}",
        where=str(path),
        fix='name a file that `Accelerator(log_with="jsonl")` wrote'
        if version is None
        else "use the Headway that wrote it, or a later one",
    )


def _object_in(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # torn, or not UTF-8
        return None
    is_one = isinstance(found, dict) and all(
        isinstance(found.get(name, {}), dict) for name in ("values", "config")
    )
    return found if is_one else None


def _float(value: Any) -> float:
    """Return a number as JSON has it; NaN for anything else."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _numbers_in(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, (int, float)):
            yield shown(name), _float(value)
        elif isinstance(value, str) and value in _NOT_FINITE:
            yield shown(name), _NOT_FINITE[value]
