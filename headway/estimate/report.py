"""Shows what a script takes: the peak and its parts, what fits, and the line to launch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.contract.sizes import size
from headway.contract.strategies import DDP
from headway.estimate.attempt import CATEGORIES, FAKE, REAL, STATES, Attempt, Outcome
from headway.estimate.devices import Devices
from headway.estimate.planner import MARGIN_BYTES, MARGIN_SHARE, BatchSizes, Judged
from headway.settings.table import YES

if TYPE_CHECKING:
    from rich.console import Console

CHECKED = "checked against CPU runs only"
_LONGEST_LINE = 300  # characters of a script's output

_COLOURS = dict(
    zip(CATEGORIES, ("blue", "magenta", "yellow", "green", "cyan", "white"), strict=True)
)
_LETTERS = dict(zip(CATEGORIES, "pgoabx", strict=True))
_RUNGS = {
    FAKE: "the script's own steps, on fake tensors",
    REAL: "the script's own steps, for real on this CPU: tensors of the host are counted, too",
    STATES: "the states alone: activations not counted",
}
_VERDICTS = {None: "unknown", True: "fits", False: "does not fit"}


class Report(NamedTuple):
    """All that was found."""

    attempt: Attempt  # the script and its arguments
    devices: Devices  # what it is to be trained on
    rows: Sequence[Judged]  # by strategy, cheapest first
    batches: BatchSizes | None = None  # that were tried

    @property
    def chosen(self) -> Judged | None:
        """The cheapest strategy that fits."""
        return next((one for one in self.rows if one.fits), None)

    def launch_line(self, judged: Judged) -> str:
        """Return the command that starts the training."""
        devices, attempt = self.devices, self.attempt
        words = ["headway", "launch"]
        if devices.kind == "cpu":
            words.append("--cpu")
        if devices.machines > 1:
            words += ["--num-machines", str(devices.machines)]
        if devices.per_machine > 1:
            words += ["--num-processes", str(devices.per_machine)]
        for name, value in judged.row.settings.items():
            if value != DDP:  # what a launch does by itself
                words.append(f"--{name.replace('_', '-')}")
                words += [value] * (value != YES)
        words += ["-m"] * attempt.is_module
        return shlex.join([*words, attempt.program, *attempt.args])


def as_data(report: Report) -> dict[str, Any]:
    """Return the report for `--json`; all sizes are in bytes."""
    devices = report.devices
    return {
        "program": report.attempt.program,
        "devices": devices._asdict(),
        "margin": {"bytes": MARGIN_BYTES[devices.kind], "share_of_peak": MARGIN_SHARE},
        "checked": CHECKED,
        "strategies": [_row_data(report, one) for one in report.rows],
    }


def _row_data(report: Report, judged: Judged) -> dict[str, Any]:
    outcome = judged.outcome
    rank = {
        "peak_bytes": outcome.peak_bytes,
        "peak_at": outcome.peak_at,
        "parts": outcome.categories,
    }
    data = {
        "strategy": judged.row.name,
        "rung": outcome.rung,
        "fits": judged.fits,
        "needed_bytes": judged.needed_bytes,
        "modules": [part._asdict() for part in outcome.modules],
        "units": outcome.units,
        "notes": outcome.notes,
        "failed_at": outcome.failed_at,
        "launch": report.launch_line(judged),
        "is_tested": not judged.row.offloaded,
        "ranks": [{"rank": number, **rank} for number in range(report.devices.world_size)],
    }
    if report.batches is not None:
        data["largest_batch"] = judged.largest_batch
    return data


def show(report: Report) -> None:
    """Print the report to standard output; with colours on a terminal."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    first = report.rows[0]
    program = shlex.join([report.attempt.program, *report.attempt.args])
    _say(console, f"{program} on {report.devices}, {first.row.name}")
    _say(console, f"followed by: {_RUNGS[first.outcome.rung]}")
    if first.outcome.failed_at:
        _say(console, f"failed at:   {first.outcome.failed_at}")
    _show_peak(console, report.devices, first)
    _say(console, "\nthe modules that take most:")
    for part in first.outcome.modules:
        parts = ", ".join(f"{name} {size(count)}" for name, count in part.bytes.items() if count)
        _say(console, f"  {size(sum(part.bytes.values())):>12}  {part.module}: {parts}")
    _show_rows(console, report)
    _show_launch(console, report)
    for note in dict.fromkeys(note for one in report.rows for note in one.outcome.notes):
        _say(console, f"note: {note}")
    _say(console, CHECKED)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _show_peak(console: Console, devices: Devices, judged: Judged) -> None:
    from rich.text import Text

    outcome = judged.outcome
    what = "states" if outcome.rung == STATES else "peak"
    share = f"{size(MARGIN_BYTES[devices.kind])} + {MARGIN_SHARE:.0%}"
    _say(
        console,
        f"\n{what} of each rank {size(outcome.peak_bytes)}; with a margin of {share} "
        f"{size(judged.needed_bytes)} of {size(devices.bytes_per_rank)}: {_VERDICTS[judged.fits]}",
    )
    if outcome.peak_at:
        _say(console, f"the peak is {outcome.peak_at}")
    width = max(20, min(console.width, 100) - 2)
    whole = max(sum(outcome.categories.values()), 1)
    bar, key = Text("["), Text()
    used = 0
    for name in CATEGORIES:
        used += outcome.categories[name]
        end = round(width * used / whole)
        bar.append(_LETTERS[name] * (end + 1 - len(bar)), _COLOURS[name])
        key.append("\n  ").append(_LETTERS[name], _COLOURS[name])
        key.append(f" {name:<13}{size(outcome.categories[name]):>12}")
    console.print(bar.append("]").append(key), soft_wrap=True)


def _show_rows(console: Console, report: Report) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    heads = ["strategy", "peak", "with margin", "fits"]
    if report.batches is not None:
        heads.append(f"largest {report.batches.flag}")
    for head in heads:
        table.add_column(head, justify="left" if head == "strategy" else "right")
    for one in report.rows:
        peak = size(one.outcome.peak_bytes) + ("" if one.outcome.rung == FAKE else " *")
        cells = [one.row.name, peak, size(one.needed_bytes), _VERDICTS[one.fits]]
        if report.batches is not None:
            cells.append(str(one.largest_batch or "none"))
        table.add_row(*cells)
    console.print()
    console.print(table)
    for one in report.rows:
        if one.outcome.rung != FAKE:
            _say(console, f"* {one.row.name}: {_RUNGS[one.outcome.rung]}")


def _show_launch(console: Console, report: Report) -> None:
    chosen = report.chosen
    console.print()
    if chosen is None:
        _say(console, "no strategy is known to fit; take smaller batches, or more devices")
    else:
        _say(console, report.launch_line(chosen))
        if chosen.row.settings != {"strategy": DDP}:
            _say(console, "it needs a script whose model goes through accelerator.prepare()")
    for one in report.rows:
        if one.row.offloaded:
            _say(console, f"note: {one.row.name} has not been tried on a GPU")


def failure(outcomes: Iterable[Outcome]) -> str:
    """Return the last lines that a script printed before it could not be followed."""
    text = next((one.output for one in outcomes if one.output), "")
    return "\n".join(line[:_LONGEST_LINE] for line in text.splitlines()[-10:])
