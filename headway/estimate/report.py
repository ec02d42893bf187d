"""Shows what a script takes: the peak and its parts, what fits, and the line to launch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from headway.contract.sizes import size
from headway.contract.strategies import DDP
from headway.estimate.devices import Devices
from headway.estimate.planner import MARGIN_BYTES, MARGIN_SHARE, Attempt, Judged, Outcome
from headway.settings.table import YES

CHECKED = "checked against CPU runs only"
_LONGEST_LINE = 300  # characters of a script's output

_VERDICTS = {None: "unknown", True: "fits", False: "does not fit"}


class Report(NamedTuple):
    attempt: Attempt  # the script and its arguments
    devices: Devices  # what it is to be trained on
    rows: Sequence[Judged]  # by strategy, cheapest first

    @property
    def chosen(self) -> Judged | None:
        return next((one for one in self.rows if one.fits), None)

    def launch_line(self, judged: Judged) -> str:
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


def show(report: Report) -> None:
    first = report.rows[0]
    program = shlex.join([report.attempt.program, *report.attempt.args])
    print(f"{program} on {report.devices}, {first.row.name}")
    _show_peak(report.devices, first)
    _show_rows(report)
    _show_launch(report)
    for note in dict.fromkeys(note for one in report.rows for note in one.outcome.notes):
        print(f"note: {note}")
    print(CHECKED)


def _show_peak(devices: Devices, judged: Judged) -> None:
    outcome = judged.outcome
    share = f"{size(MARGIN_BYTES[devices.kind])} + {MARGIN_SHARE:.0%}"
    print(
        f"\npeak of each rank {size(outcome.peak_bytes)}; with a margin of {share} "
        f"{size(judged.needed_bytes)} of {size(devices.bytes_per_rank)}: {_VERDICTS[judged.fits]}"
    )
    if outcome.peak_at:
        print(f"the peak is {outcome.peak_at}")
    whole = max(sum(outcome.categories.values()), 1)
    for name, count in outcome.categories.items():
        print(f"  {name:<13}{size(count):>12}{count / whole:>6.0%}")


def _show_rows(report: Report) -> None:
    rows: list[tuple[str, tuple[str, ...]]] = [("strategy", ("peak", "with margin", "fits"))]
    for one in report.rows:
        sizes = [size(one.outcome.peak_bytes), size(one.needed_bytes)]
        known = ["", ""] if one.outcome.failed_at else sizes
        rows.append((one.row.name, (*known, _VERDICTS[one.fits])))
    first = max(len(name) for name, _ in rows)
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows), strict=True)]
    print()
    for name, cells in rows:
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        print("  ".join((f"{name:<{first}}", *padded)))
    for one in report.rows:
        if one.outcome.failed_at:
            print(f"{one.row.name} could not be followed: {one.outcome.failed_at}")


def _show_launch(report: Report) -> None:
    chosen = report.chosen
    print()
    if chosen is None:
        print("no strategy is known to fit; take smaller batches, or more devices")
    else:
        print(report.launch_line(chosen))
        if chosen.row.settings != {"strategy": DDP}:
            print("it needs a script whose model goes through accelerator.prepare()")


def last_lines(outcome: Outcome) -> str:
    return "\n".join(line[:_LONGEST_LINE] for line in outcome.output.splitlines()[-10:])
