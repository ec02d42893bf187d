"""Charts as text, by plotext."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.commands.plotting.charts import Chart, Curve, number

NARROWEST = 24  # columns; narrower terminals wrap
_ROWS = 14
_MARKERS = "ox+*#@%&"
_ASCII = str.maketrans("│─┌┐└┘┤├┬┴┼", "|-++++++++" + "+")


def draw_chart(chart: Chart, width: int, encoding: str) -> str:
    """Return a chart as lines of text, with a summary of each curve below it.

    Args:
        width: of the terminal, in columns.
        encoding: of the terminal; without Unicode the chart is ASCII.
    """
    markers = [_marker(index, len(chart.curves), encoding) for index in range(len(chart.curves))]
    lines = []
    curves = [curve.finite() for curve in chart.curves]
    if any(curve.values for curve in curves):
        lines.append(_draw(chart.metric, curves, markers, max(width, NARROWEST)))
    else:
        lines.append(chart.metric)
    for curve, marker in zip(chart.curves, markers, strict=True):
        name = f"{marker} {curve.label}: " if len(chart.curves) > 1 else ""
        lines.append(f"{name}{curve.summary()}")
    text = "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())
    return text if _is_unicode(encoding) else text.translate(_ASCII)


def _draw(title: str, curves: Sequence[Curve], markers: Sequence[str], width: int) -> str:
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
