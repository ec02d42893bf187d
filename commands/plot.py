"""`headway plot RUN...`: draw the metrics of runs that the jsonl tracker wrote.

A chart for each metric, as text by plotext, or in a picture by matplotlib.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from headway.commands.flags import Parser, bad_words
from headway.contract.notes import say
from headway.errors import ConfigError, MachineError, did_you_mean
from headway.trackers.run_file import SUFFIX, Run, is_run, read_run_file

RUN = (
    'RUN: a file that Accelerator(log_with="jsonl") wrote, or a folder, which means its newest one;'
    "\nseveral are compared."
)

NARROWEST = 24  # columns of a terminal; narrower ones wrap
FIX = 'train with `Accelerator(log_with="jsonl", project_dir="runs")`, or name another run'
_MOST_DIFFERENCES = 3  # of configs, in a label
_ROWS = 14
_MARKERS = "ox+*#@%&"
_ASCII = str.maketrans("│─┌┐└┘┤├┬┴┼", "|-++++++++" + "+")
_WIDTH, _HEIGHT = 6.0, 3.6  # inches, of one chart in a picture
_MOST = 1e300
_FEW = 50  # points; a curve of so few shows each


def main(argv: Sequence[str]) -> int:
    """Run `headway plot` with these words and return the exit code."""
    parser = Parser(
        "plot",
        "Draw the metrics of runs that the jsonl tracker wrote: in the terminal, or as a picture. "
        "It needs the extra: pip install 'headway[plot]'.",
        usage="headway plot [--metrics NAMES] [--output FILE] RUN ...",
        appendix=f"\n{RUN}\n",
    )
    parser.flag(
        "--metrics",
        metavar="NAMES",
        help="the metrics to draw, separated by commas; a name may have wildcards: 'train/*'",
    )
    parser.flag(
        "--output",
        metavar="FILE",
        help="write a picture instead: its kind is that of the name, such as .png or .svg",
    )
    parsed, words = parser.parse_words(argv)
    if not words:
        parser.error("headway plot requires a run: a file or a folder")
    _require("plotext" if parsed.output is None else "matplotlib")
    runs = read_runs(words)
    wanted = [name.strip() for name in (parsed.metrics or "").split(",") if name.strip()]
    charts = charts_of(runs, wanted)
    for run in runs:
        if run.damaged_lines:
            say(f"note: {run.damaged_lines} damaged lines of {run.path} are left out")
    if parsed.output is not None:
        title = ", ".join(dict.fromkeys(run.project for run in runs))
        save_picture(charts, title, Path(parsed.output))
        print(parsed.output)
        return 0
    width, encoding = shutil.get_terminal_size().columns, sys.stdout.encoding or "utf-8"
    print(*(str(run.path) for run in runs), sep="\n")
    for chart in charts:
        print(f"\n{draw_chart(chart, width, encoding)}")
    return 0


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise MachineError(
            f"`headway plot` draws with {package}, which is not installed",
            where="this Python's packages",
            fix=f"`{sys.executable} -m pip install 'headway[plot]'`",
        )


# ------------------------------------------- a chart for each metric, as text or in a picture


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
    """Return the file that a word of the command line means: itself, or a folder's newest run."""
    path = Path(word)
    if path.is_file():
        return path
    if not path.is_dir():
        raise bad_words(f"there is no file or folder {word!r}", fix=FIX)
    files = sorted(path.rglob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
    newest = next(filter(is_run, files), None)
    if newest is None:
        raise bad_words(f"the folder {word!r} has no run of the jsonl tracker", fix=FIX)
    return newest


def read_runs(words: Sequence[str]) -> list[Run]:
    """Return the runs that these words mean, each once."""
    paths = {path.resolve(): path for path in map(find_run, words)}
    return [read_run_file(path) for path in paths.values()]


def charts_of(runs: Sequence[Run], wanted: Sequence[str]) -> list[Chart]:
    """Return the charts of the metrics that names or shell patterns in `wanted` mean, or of all."""
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


def draw_chart(chart: Chart, width: int, encoding: str) -> str:
    """Return a chart as lines of text, with a summary of each curve below it.

    It is as wide as the terminal, and ASCII where the terminal's encoding lacks Unicode.
    """
    markers = [_marker(index, len(chart.curves), encoding) for index in range(len(chart.curves))]
    lines = []
    curves = [curve.finite() for curve in chart.curves]
    if any(curve.values for curve in curves):
        lines.append(_as_text(chart.metric, curves, markers, max(width, NARROWEST)))
    else:
        lines.append(chart.metric)
    for curve, marker in zip(chart.curves, markers, strict=True):
        name = f"{marker} {curve.label}: " if len(chart.curves) > 1 else ""
        lines.append(f"{name}{curve.summary()}")
    text = "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())
    return text if _is_unicode(encoding) else text.translate(_ASCII)


def _as_text(title: str, curves: Sequence[Curve], markers: Sequence[str], width: int) -> str:
    from plotext import figure, terminal

    terminal.limit(width=False, height=False)  # `width` is the limit
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, _ROWS)
    figure.title(title)
    for curve, marker in zip(curves, markers, strict=True):
        if curve.values:
            thin = curve.thinned(2 * width)
            signal = figure.signal(thin.steps, thin.values, marker=marker)
            signal.lines(len(thin.values) > 1)
            figure.draw(signal)
    steps = [step for curve in curves for step in curve.steps]
    values = [value for curve in curves for value in curve.values]
    _set_axis(figure.ruler("x"), steps, max(2, width // 16))
    _set_axis(figure.ruler("y"), values, 5)
    text: str = figure.build().string(True)
    return text.strip("\n")


def _set_axis(ruler: object, numbers: Sequence[float], count: int) -> None:
    low, high = min(numbers), max(numbers)
    ticks = ticks_between(low, high, count)
    ruler.ticks(ticks, list(map(number, ticks)))  # type: ignore[attr-defined]


def ticks_between(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`; at least one number."""
    if low == high:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step)
    ticks = [index * step for index in range(first, math.floor(high / step) + 1)]
    return ticks or [low]


def _marker(index: int, curves: int, encoding: str) -> str:
    if curves == 1 and _is_unicode(encoding):
        return "braille"
    return _MARKERS[index % len(_MARKERS)]


def _is_unicode(encoding: str) -> bool:
    return encoding.lower().replace("-", "").startswith("utf")


def save_picture(charts: Sequence[Chart], title: str, path: Path) -> None:
    """Write the charts into one picture; the file's ending says of which kind."""
    from matplotlib.figure import Figure

    columns = 1 if len(charts) == 1 else 2
    rows = math.ceil(len(charts) / columns)
    figure = Figure((columns * _WIDTH, rows * _HEIGHT + 0.4), layout="constrained")
    figure.suptitle(title, parse_math=False)
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ConfigError(
            f"{path.name!r} does not end in the name of a kind of picture",
            where="--output",
            fix="use a name such as loss.png or loss.svg",
        )
    for index, chart in enumerate(charts):
        _add_to(figure.add_subplot(rows, columns, index + 1), chart)
    try:
        figure.savefig(path, dpi=144)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}",
            where="--output",
            fix="name a file in a folder that exists and that you may write",
        ) from None


def _add_to(axes: Any, chart: Chart) -> None:
    for curve in chart.curves:
        # a value that is not finite is a gap, as is one of which matplotlib has no multiples
        values = [value if abs(value) < _MOST else math.nan for value in curve.values]
        marker = "o" if len(values) <= _FEW else ""
        label = curve.label.lstrip("_") or "run"  # matplotlib hides names that begin with "_"
        axes.plot(curve.steps, values, label=label, marker=marker, markersize=3, linewidth=1.2)
    axes.set_title(chart.metric, fontsize="medium", parse_math=False)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if len(chart.curves) > 1:
        axes.legend(fontsize="small")
