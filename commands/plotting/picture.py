"""Charts as a PNG, SVG or PDF file, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.commands.plotting.charts import Chart
from headway.errors import ConfigError

_WIDTH, _HEIGHT = 6.0, 3.6  # inches, of one chart
_MOST = 1e300
_FEW = 50  # points; a curve of so few shows each


def save_picture(charts: Sequence[Chart], title: str, path: Path) -> None:
    """Write the charts into one picture; the file's ending says of which kind.

    Raises:
        ConfigError: there is no such kind, or the file cannot be written.
    """
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
        _draw(figure.add_subplot(rows, columns, index + 1), chart)
    try:
        figure.savefig(path, dpi=144)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}",
            where="--output",
            fix="name a file in a folder that exists and that you may write",
        ) from None


def _draw(axes: Any, chart: Chart) -> None:
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
