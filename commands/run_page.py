"""A run as one page of HTML: its report, its curves, its phases, its memory, what has changed.

It holds all that it shows: pictures are SVG, and there is no script and nothing of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from headway.commands.plot import Curve, number, ticks_between
from headway.commands.runs import ended, slow_rank, took
from headway.commands.tables import when
from headway.contract.step_clock import Figures
from headway.history.changes import Change
from headway.history.record import Record

_WIDTH, _HEIGHT = 440, 190
_LEFT, _RIGHT, _BOTTOM, _TOP = 56, 16, 26, 8
_MOST_POINTS = 300
_MOST_RANKS = 64  # that have a row or a curve of their own
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


def page(record: Record, good: Record | None, changes: Sequence[Change]) -> str:
    """Return the page of a run, with the changes since `good`, the last one that ended well."""
    start = record.start
    parts = [
        f"<h1>{_text(start.program)}: {_verdict(record)}</h1>",
        _table(
            ("run", record.name),
            ("began", f"{when(start.began_at)}, took {took(record)}"),
            ("ranks", _ranks(record)),
            ("steps", str(record.num_steps or "-")),
            ("samples/s", "-" if (speed := record.samples_per_s) is None else number(speed)),
            *((kept.what, kept.path) for kept in record.kept),
            ("command", " ".join(["headway launch", *start.command])),
        ),
        *(f"<p>{_text(slow)}</p>" for slow in [slow_rank(record)] if slow),
        *_report(record),
        *_changed(good, changes),
        *_pictures(record.figures),
        "<h2>Machine</h2>",
        _table(*start.machine.items()),
        "<h2>Settings</h2>",
        _table(*((name, f"{start.settings.get(name)} ({o})") for name, o in start.origins.items())),
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
    """Return text of a record as HTML; control characters are shown as what they are."""
    shown = (
        char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in str(text)
    )
    return escape("".join(shown))


def _verdict(record: Record) -> str:
    kind = "good" if record.has_ended_well else "bad" if record.end is not None else ""
    return f'<span class="{kind}">{_text(ended(record))}</span>'


def _ranks(record: Record) -> str:
    start = record.start
    text = f"{start.num_processes * start.num_machines} on {start.settings.get('device', '?')}"
    return text + (f", {start.num_machines} machines" if start.num_machines > 1 else "")


def _table(*rows: tuple[str, str]) -> str:
    cells = (
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows if value
    )
    return f"<table>{''.join(cells)}</table>"


def _report(record: Record) -> Iterator[str]:
    if record.end is not None and record.end.report:
        yield f"<h2>Report</h2><pre>{_text(record.end.report)}</pre>"
    if record.restarts:
        rows = ((when(one.time), one.line) for one in record.restarts)
        yield f"<h2>Restarts</h2>{_table(*rows)}"


def _changed(good: Record | None, changes: Sequence[Change]) -> Iterator[str]:
    if good is None:
        return
    yield f"<h2>Changed since run {_text(good.name)}, which ended well</h2>"
    if not changes:
        yield "<p>Nothing that is recorded.</p>"
        return
    yield "<table><tr><th>what</th><th>then</th><th>now</th></tr>"
    for one in changes:
        yield f"<tr><th>{_text(one.kind)} {_text(one.name)}</th><td>{_text(one.before)}</td>"
        detail = f"<pre>{_text(one.detail)}</pre>" if one.detail else ""
        yield f"<td>{_text(one.after)}{detail}</td></tr>"
    yield "</table>"


def _pictures(figures: Mapping[int, Sequence[Figures]]) -> Iterator[str]:
    shown = {rank: figures[rank] for rank in sorted(figures)[:_MOST_RANKS] if figures[rank]}
    if not shown:
        return
    if len(figures) > len(shown):
        yield f"<p>The pictures show {len(shown)} of {len(figures)} ranks.</p>"
    losses = [_curve(rank, rows, lambda row: row.loss) for rank, rows in shown.items()]
    yield from _chart("Loss", [curve for curve in losses if curve.values][:1])
    yield from _chart(
        "Samples per second, of each rank",
        [_curve(rank, rows, _speed) for rank, rows in shown.items()],
    )
    yield f"<h2>Time of each rank</h2>{_phases(shown)}"
    yield from _chart(
        "Memory of each rank, MiB",
        [_curve(rank, rows, lambda row: row.rss_bytes / 2**20) for rank, rows in shown.items()],
    )
    devices = [
        _curve(
            rank, rows, lambda row: None if row.device_bytes is None else row.device_bytes / 2**20
        )
        for rank, rows in shown.items()
    ]
    yield from _chart("Memory of the device, MiB", [curve for curve in devices if curve.values])


def _speed(row: Figures) -> float | None:
    return row.samples / row.seconds if row.samples and row.seconds > 0 else None


def _curve(rank: int, rows: Sequence[Figures], value: Callable[[Figures], float | None]) -> Curve:
    pairs = [(float(row.step), found) for row in rows if (found := value(row)) is not None]
    whole = Curve(f"rank {rank}", [step for step, _ in pairs], [one for _, one in pairs])
    return whole.finite().thinned(_MOST_POINTS)


class _Scale(NamedTuple):
    """Where numbers are in a picture."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        part = (value - self.low) / span if span else 0.5
        return round(self.begin + part * (self.end - self.begin), 1)


def _chart(title: str, curves: Sequence[Curve]) -> Iterator[str]:
    """Yield a chart of curves over steps; nothing where there are none."""
    drawn = [curve for curve in curves if curve.values]
    if not drawn:
        return
    steps = [step for curve in drawn for step in curve.steps]
    values = [value for curve in drawn for value in curve.values]
    across = _Scale(min(steps), max(steps), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(min(values), max(values), _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for tick in ticks_between(up.low, up.high, 4):
        y = up(tick)
        parts.append(f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" stroke="#8885"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{number(tick)}</text>')
    for tick in ticks_between(across.low, across.high, 6):
        x = across(tick)
        parts.append(f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="middle">{number(tick)}</text>')
    for index, curve in enumerate(drawn):
        points = zip(curve.steps, curve.values, strict=True)
        path = " ".join(f"{across(step)},{up(value)}" for step, value in points)
        colour = _COLOURS[index % len(_COLOURS)]
        kind, shape = (
            "polyline",
            f'points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"',
        )
        if len(curve.values) == 1:
            kind = "circle"
            shape = (
                f'cx="{across(curve.steps[0])}" cy="{up(curve.values[0])}" r="3" fill="{colour}"'
            )
        parts.append(f"<{kind} {shape}><title>{_text(curve.label)}</title></{kind}>")
    yield f"<h2>{_text(title)}</h2>" + _svg(title, _HEIGHT, parts)
    if len(drawn) > 1:
        yield _keys((one.label, _COLOURS[i % len(_COLOURS)]) for i, one in enumerate(drawn))


def _phases(figures: Mapping[int, Sequence[Figures]]) -> str:
    """Return a bar for each rank, of its time in each phase that is known, over the longest's."""
    every = [row for rows in figures.values() for row in rows]
    phases = [one for one in _PHASES if any(getattr(row, one[1]) for row in every)]
    totals = {rank: sum(row.seconds for row in rows) for rank, rows in figures.items()}
    longest = max(totals.values()) or 1.0
    row_height = 22
    parts = []
    for place, (rank, rows) in enumerate(figures.items()):
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
    return _svg("Time of each rank", len(figures) * row_height, parts) + _keys(keys)


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{_text(title)}">'
    return f"{head}{''.join(parts)}</svg>"


def _keys(named: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f'<span class="key"><i style="background:{colour}"></i>{_text(name)}</span>'
        for name, colour in named
    )
