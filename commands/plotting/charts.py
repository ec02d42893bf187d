"""What is drawn: a chart for each metric, with a curve for each run. Pure, but for reading runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from headway.errors import ConfigError, did_you_mean
from headway.trackers.run_file import SUFFIX, Run, is_run, read_run_file

_MOST_DIFFERENCES = 3  # of configs, in a label
FIX = 'train with `Accelerator(log_with="jsonl", project_dir="runs")`, or name another run'


class Curve(NamedTuple):
    """One metric of one run; values may be NaN or infinite."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]

    def finite(self) -> Curve:
        """Return the curve without the values that are not finite."""
        pairs = zip(self.steps, self.values, strict=True)
        kept = [pair for pair in pairs if math.isfinite(pair[1])]
        return Curve(self.label, [step for step, _ in kept], [value for _, value in kept])

    def thinned(self, buckets: int) -> Curve:
        """Return at most two points for each of so many equal parts: the lowest and the highest."""
        if len(self.values) <= 2 * buckets:
            return self
        kept: list[int] = []
        for part in range(buckets):
            begin = part * len(self.values) // buckets
            inside = range(begin, (part + 1) * len(self.values) // buckets)
            kept += {
                min(inside, key=self.values.__getitem__),
                max(inside, key=self.values.__getitem__),
            }
        kept.sort()
        return Curve(
            self.label,
            [self.steps[index] for index in kept],
            [self.values[index] for index in kept],
        )

    def summary(self) -> str:
        """Return the last value and the extremes, in words."""
        finite = self.finite()
        missing = len(self.values) - len(finite.values)
        odd = f"{missing} not finite" if missing else ""
        if not finite.values:
            return f"no finite value; {odd}"
        low, high = min(finite.values), max(finite.values)
        at_low = finite.steps[finite.values.index(low)]
        at_high = finite.steps[finite.values.index(high)]
        parts = [
            f"last {number(finite.values[-1])} at step {number(finite.steps[-1])}",
            f"lowest {number(low)} at {number(at_low)}",
            f"highest {number(high)} at {number(at_high)}",
        ]
        return "; ".join(parts + [odd] * bool(odd))


class Chart(NamedTuple):
    """One metric of all runs that have it."""

    metric: str
    curves: Sequence[Curve]


def number(value: float) -> str:
    """Return a number as axes and summaries show it."""
    is_whole = value == int(value) and abs(value) < 1e12
    return str(int(value)) if is_whole else f"{value:.4g}"


def find_run(word: str) -> Path:
    """Return the file that a word of the command line means: itself, or a folder's newest run.

    Raises:
        ConfigError: there is none.
    """
    path = Path(word)
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"there is no file or folder {word!r}", where="the command line", fix=FIX)
    files = sorted(path.rglob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
    newest = next(filter(is_run, files), None)
    if newest is None:
        raise ConfigError(
            f"the folder {word!r} has no run of the jsonl tracker",
            where="the command line",
            fix=FIX,
        )
    return newest


def read_runs(words: Sequence[str]) -> list[Run]:
    """Return the runs that these words mean, each once."""
    paths = {path.resolve(): path for path in map(find_run, words)}
    return [read_run_file(path) for path in paths.values()]


def charts_of(runs: Sequence[Run], wanted: Sequence[str]) -> list[Chart]:
    """Return the charts of runs.

    Args:
        wanted: names or shell patterns of metrics; all metrics if it is empty.

    Raises:
        ConfigError: a name or pattern means no metric, or no run has any.
    """
    there = list(dict.fromkeys(name for run in runs for name in run.metrics))
    if not there:
        raise ConfigError(
            "no number has been logged",
            where=", ".join(str(run.path) for run in runs),
            fix="call accelerator.log({...}, step=...) with numbers",
        )
    metrics = [name for pattern in wanted for name in _matching(pattern, there)] or there
    labels = _labels(runs)
    return [
        Chart(
            metric,
            [
                Curve(label, *run.metrics[metric])
                for label, run in zip(labels, runs, strict=True)
                if metric in run.metrics
            ],
        )
        for metric in dict.fromkeys(metrics)
    ]


def _matching(pattern: str, there: Sequence[str]) -> Iterator[str]:
    found = [name for name in there if name == pattern or fnmatchcase(name, pattern)]
    if not found:
        guess = did_you_mean(pattern, there)
        raise ConfigError(
            f"no run has a metric {pattern!r}",
            where="--metrics",
            fix=(f"did you mean {guess!r}? " if guess else "") + f"there are: {', '.join(there)}",
        )
    yield from found


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run: its file's, or its path, and what is special in its config."""
    stems = [run.path.stem for run in runs]
    names = stems if len(set(stems)) == len(stems) else [str(run.path) for run in runs]
    keys = dict.fromkeys(key for run in runs for key in run.config)
    different = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    for index, run in enumerate(runs):
        special = [f"{key}={run.config.get(key)}" for key in different[:_MOST_DIFFERENCES]]
        if special:
            names[index] += f" ({', '.join(special)})"
    return names
