"""The HTML page of a run: report, curves, phases, memory and changes.

The page is self-contained: charts are SVG, and it needs neither scripts nor the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from headway.commands.changes import Change
from headway.commands.runs import command_line, duration, outcome, restarts, slow_rank, time_shares
from headway.commands.tables import when
from headway.errors import ConfigError
from headway.history.record import RunRecord
from headway.ipc.records import METRICS, StepStats
from headway.ipc.stderr import shown
from headway.trackers.run_file import read_metrics

_WIDTH, _HEIGHT = 440, 190
_LEFT, _RIGHT, _BOTTOM, _TOP = 56, 16, 26, 8
_MOST_POINTS = 300
_MOST_RANKS = 64  # ranks shown in a chart
_MOST_METRICS = 24
_LARGEST, _SMALLEST = 1e100, 1e-300  # limits of drawn values
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#65a30d")
_PHASES = (
    ("data", "data_s", "#f59e0b"),
    ("forward", "forward_s", "#3b82f6"),
    ("backward", "backward_s", "#1d4ed8"),
    ("sync", "sync_s", "#dc2626"),
    ("save", "save_s", "#10b981"),
)
_REST = ("other", "#9ca3af")
_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.45 system-ui,sans-serif;max-width:760px;margin:0 auto;padding:12px}
h1{font-size:1.3em;overflow-wrap:anywhere}h2{font-size:1.05em;margin:1.6em 0 .4em}
pre{white-space:pre-wrap;overflow-wrap:anywhere;
padding:10px;border:1px solid #8886;border-radius:6px;font-size:13px}
table{border-collapse:collapse;width:100%;font-size:14px}
td,th{text-align:left;vertical-align:top;padding:3px 8px 3px 0;border-bottom:1px solid #8884;
overflow-wrap:anywhere;min-width:3.5em}th{overflow-wrap:normal}
svg{width:100%;max-width:560px;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:currentColor}
.bad{color:#dc2626}.good{color:#059669}.key{display:inline-block;margin-right:1em;font-size:13px}
.key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em;border-radius:2px}
"""


def page(record: RunRecord, good: RunRecord | None, changes: Sequence[Change]) -> str:
    """Return the page of a run, with the changes since `good`, the last successful run."""
    start = record.start
    kind = "good" if record.has_succeeded else "bad" if record.end is not None else ""
    parts = [
        f'<h1>{_text(start.program)}: <span class="{kind}">{_text(outcome(record))}</span></h1>',
        _table(
            ("run", record.name),
            ("began", f"{when(start.began_at)}, took {duration(record)}"),
            ("time", time_shares(record)),
            ("restarts", "; ".join(restarts(record))),
            ("ranks", _ranks(record)),
            ("steps", str(record.num_steps or "-")),
            ("samples/s", "-" if (speed := record.samples_per_s) is None else _number(speed)),
            *((kept.what, kept.path) for kept in record.kept),
            ("command", command_line(record)),
        ),
        *(f"<p>{_text(slow)}</p>" for slow in [slow_rank(record)] if slow),
        *_report(record),
        *_changes(good, changes),
        *_rank_charts(record.stats),
        *_metrics(record),
        "<h2>Machine</h2>",
        _table(*start.machine.items()),
        "<h2>Settings</h2>",
        _table(*((name, f"{start.settings[name]} ({o})") for name, o in start.origins.items())),
    ]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_text(start.program)}, run {record.name}</title><style>{_STYLE}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )


def _text(text: object) -> str:
    """Escape a record's text for HTML, including control characters."""
    return escape("\n".join(map(shown, str(text).split("\n"))))


def _ranks(record: RunRecord) -> str:
    start = record.start
    text = f"{start.num_processes * start.num_machines} on {start.settings['device']}"
    return text + (f", {start.num_machines} machines" if start.num_machines > 1 else "")


def _table(*rows: tuple[str, str]) -> str:
    cells = (
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows if value
    )
    return f"<table>{''.join(cells)}</table>"


def _report(record: RunRecord) -> Iterator[str]:
    if record.end is not None and record.end.report:
        yield f"<h2>Report</h2><pre>{_text(record.end.report)}</pre>"


def _changes(good: RunRecord | None, changes: Sequence[Change]) -> Iterator[str]:
    if good is None:
        return
    yield f"<h2>Changed since run {_text(good.name)}, which succeeded</h2>"
    if not changes:
        yield "<p>No recorded changes.</p>"
        return
    yield "<table><tr><th>what</th><th>then</th><th>now</th></tr>"
    for row in changes:
        yield f"<tr><th>{_text(row.kind)} {_text(row.name)}</th><td>{_text(row.before)}</td>"
        detail = f"<pre>{_text(row.detail)}</pre>" if row.detail else ""
        yield f"<td>{_text(row.after)}{detail}</td></tr>"
    yield "</table>"


def _rank_charts(stats: Mapping[int, Sequence[StepStats]]) -> Iterator[str]:
    drawn = {rank: stats[rank] for rank in sorted(stats)[:_MOST_RANKS] if stats[rank]}
    if not drawn:
        return
    if len(stats) > len(drawn):
        yield f"<p>The charts show {len(drawn)} of {len(stats)} ranks.</p>"

    def of_ranks(value: Callable[[StepStats], float | None]) -> list[_Curve]:
        return [
            _Curve.of(f"rank {rank}", ((row.step, value(row)) for row in rows))
            for rank, rows in drawn.items()
        ]

    losses = [curve for curve in of_ranks(lambda row: row.loss) if curve.points]
    yield from _chart("Loss", losses[:1])
    yield from _chart(
        "Samples per second of each rank",
        of_ranks(
            lambda row: row.samples / row.seconds if row.samples and row.seconds > 0 else None
        ),
    )
    yield f"<h2>Time of each rank</h2>{_phases(drawn)}"
    yield from _chart("Memory of each rank, MiB", of_ranks(lambda row: row.rss_bytes / 2**20))
    of_devices = of_ranks(lambda row: row.device_bytes and row.device_bytes / 2**20)
    yield from _chart("Memory of the device, MiB", of_devices)


def _metrics(record: RunRecord) -> Iterator[str]:
    """Yield a chart of each metric that the jsonl tracker wrote."""
    for path in (kept.path for kept in record.kept if kept.what == METRICS):
        try:
            metrics = read_metrics(Path(path))
        except ConfigError as error:
            yield f"<p>The metrics cannot be drawn: {_text(error.problems[0].what)}</p>"
            continue
        for name, series in [*metrics.items()][:_MOST_METRICS]:
            yield from _chart(name, [_Curve.of(name, zip(*series, strict=True))])
        if len(metrics) > _MOST_METRICS:
            yield f"<p>{_MOST_METRICS} of {len(metrics)} metrics are drawn.</p>"


class _Curve(NamedTuple):
    label: str
    points: Sequence[tuple[float, float]]

    @classmethod
    def of(cls, label: str, points: Iterable[tuple[float, float | None]]) -> _Curve:
        """Create a curve from the points that can be drawn.

        Long curves are split into equal parts, each reduced to its minimum and maximum.
        """
        kept = [(x, y) for x, y in points if y is not None and abs(y) < _LARGEST]
        size = math.ceil(len(kept) / _MOST_POINTS)
        if size > 2:
            parts = [kept[begin : begin + size] for begin in range(0, len(kept), size)]
            extremes = ({f(part, key=itemgetter(1)) for f in (min, max)} for part in parts)
            kept = [point for both in extremes for point in sorted(both)]
        return cls(label, kept)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between `low` and `high`, but at least one."""
    rough = (high - low) / count
    if rough < _SMALLEST:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    ticks = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return ticks or [low]


def _number(value: float) -> str:
    is_whole = value == int(value) and abs(value) < 1e12
    return str(int(value)) if is_whole else f"{value:.4g}"


class _Scale(NamedTuple):
    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        part = (value - self.low) / span if span else 0.5
        return round(self.begin + part * (self.end - self.begin), 1)


def _chart(title: str, curves: Sequence[_Curve]) -> Iterator[str]:
    """Yield a chart of curves over steps, unless all curves are empty."""
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return
    steps = [step for curve in drawn for step, _ in curve.points]
    values = [value for curve in drawn for _, value in curve.points]
    across = _Scale(min(steps), max(steps), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(min(values), max(values), _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for tick in _ticks(up.low, up.high, 4):
        y = up(tick)
        parts.append(f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" stroke="#8885"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_number(tick)}</text>')
    for tick in _ticks(across.low, across.high, 6):
        x = across(tick)
        parts.append(f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="middle">{_number(tick)}</text>')
    colours = [_COLOURS[index % len(_COLOURS)] for index in range(len(drawn))]
    for curve, colour in zip(drawn, colours, strict=True):
        points = [(across(step), up(value)) for step, value in curve.points]
        if len(points) == 1:
            kind = "circle"
            shape = f'cx="{points[0][0]}" cy="{points[0][1]}" r="3" fill="{colour}"'
        else:
            kind = "polyline"
            path = " ".join(f"{x},{y}" for x, y in points)
            shape = f'points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"'
        parts.append(f"<{kind} {shape}><title>{_text(curve.label)}</title></{kind}>")
    yield f"<h2>{_text(title)}</h2>" + _svg(title, _HEIGHT, parts)
    if len(drawn) > 1:
        yield _legend(zip((curve.label for curve in drawn), colours, strict=True))


def _phases(stats: Mapping[int, Sequence[StepStats]]) -> str:
    """Return one bar per rank, divided into phases and scaled to the longest bar."""
    every = [row for rows in stats.values() for row in rows]
    phases = [phase for phase in _PHASES if any(getattr(row, phase[1]) for row in every)]
    totals = {rank: sum(row.seconds for row in rows) for rank, rows in stats.items()}
    longest = max(totals.values()) or 1.0
    row_height = 22
    parts = []
    for place, (rank, rows) in enumerate(stats.items()):
        y, x = place * row_height, float(_LEFT)
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 15}" text-anchor="end">rank {rank}</text>')
        rest = totals[rank]
        for name, field, colour in (*phases, (_REST[0], "", _REST[1])):
            seconds = sum(getattr(row, field) for row in rows) if field else max(rest, 0.0)
            rest -= seconds
            width = max(seconds, 0.0) / longest * (_WIDTH - _LEFT - _RIGHT)
            about = f"rank {rank}, {name}: {seconds:.1f} s"
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{row_height - 6}" '
                f'fill="{colour}"><title>{about}</title></rect>'
            )
            x += width
    keys = [*((name, colour) for name, _, colour in phases), _REST]
    return _svg("Time of each rank", len(stats) * row_height, parts) + _legend(keys)


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{_text(title)}">'
    return f"{head}{''.join(parts)}</svg>"


def _legend(named: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f'<span class="key"><i style="background:{colour}"></i>{_text(name)}</span>'
        for name, colour in named
    )
