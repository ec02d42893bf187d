"""`headway estimate script.py [args]`: estimate the memory per rank before a launch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from headway.commands.flags import Parser
from headway.commands.program_args import program_from, require_torch
from headway.errors import Code, ConfigError, UsageError, did_you_mean
from headway.estimate import planner
from headway.ipc.choices import DDP, PRECISIONS
from headway.ipc.run_contract import ACCELERATE
from headway.ipc.stderr import size, waiting_for
from headway.launcher.plan.program import Program, interpreter
from headway.machine.detection import detect_machine
from headway.settings.table import YES

_COUNTED = ("mixed_precision", "gradient_accumulation_steps")
"""The settings that affect memory, in addition to those that configure the strategy."""

_WAITED_FOR = "the script's first two optimizer steps, on fake tensors"
_TIME_LIMIT_S = 300.0  # default of --time-limit, for a script that reaches no second step
_MOST_SECONDS = 1e9  # within the range of timers on every system

CHECKED = "checked against CPU runs only"
_LONGEST_LINE = 300  # characters of a script's output

_FITS = {None: "unknown", True: "fits", False: "does not fit"}

EXAMPLES = """
The script runs unmodified until its second optimizer step, without a GPU: its tensors have shapes
but no memory. It changes no files, starts no programs and does not access the network.

  headway estimate --devices 8xH100-80GB train.py
  headway estimate --devices 2x8xA100-40GB --mixed-precision bf16 train.py --bs 8

DEVICES has the form [MACHINESx][COUNTx]NAME[-MEMORY]: 8xH100-80GB, 2x8xA100-40GB, 24GB, 4xcpu.
"""


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    own, rest = parser.split(argv)
    parsed = parser.parse_args(own)
    parsed.no_python = False
    program = program_from(parser, parsed, own, rest)
    here = detect_machine(full=True)
    if parsed.cpu and parsed.devices is not None:
        parser.error("--cpu means --devices cpu: pass only one of them")
    text = "cpu" if parsed.cpu else parsed.devices
    devices = planner.devices_of(here) if text is None else planner.parse_devices(text, here)
    trial = planner.Trial(
        program=program.name,
        args=program.args,
        is_module=program.kind == "module",
        device=devices.kind,
        device_name=devices.name,
        device_bytes=devices.memory_bytes,
        world_size=devices.world_size,
        local_world_size=devices.per_machine,
        time_limit_s=_time_limit(parsed.time_limit),
    )
    rows = _rows(parsed.strategy, devices)
    given = {name: getattr(parsed, name) for name in _COUNTED if getattr(parsed, name) is not None}
    environ = {**os.environ, **{ACCELERATE[name]: value for name, value in given.items()}}
    require_torch()
    with waiting_for(_WAITED_FOR), planner.Planner(interpreter(), environ) as child:
        found = child.run_all(rows, trial, devices)
    first = found[0].result
    if first.failed_at:
        tail = "\n".join(line[:_LONGEST_LINE] for line in first.output.splitlines()[-10:])
        raise UsageError(
            f"cannot estimate this script: {first.failed_at}",
            where=f"{program.name}; its last lines:\n{tail}" if tail else program.name,
            fix="change the script, its arguments or the devices, so that the script reaches an"
            " optimizer step without the operation that failed",
            code=Code.NO_ESTIMATE,
        )
    _require_use_of_gpu(found, devices, program)
    flags = [word for name in given for word in (f"--{name.replace('_', '-')}", given[name])]
    _show(Report(trial, devices, found, flags))
    return 0


def make_parser() -> Parser:
    parser = Parser(
        "estimate",
        "Estimate the memory of a training script per rank, and list the settings that fit.",
        usage="headway estimate [flags] script.py [args]",
        appendix=EXAMPLES,
    )
    parser.flag("--devices", metavar="DEVICES", help="devices to use (default: this machine's)")
    parser.flag("--cpu", help="alias for --devices cpu")
    parser.flag("--strategy", metavar="NAME", help="print only this row of the table")
    of_launch = "as for headway launch; for scripts that use Accelerator"
    parser.flag("--mixed-precision", metavar="NAME", choices=list(PRECISIONS), help=of_launch)
    parser.flag("--gradient-accumulation-steps", metavar="N", help=of_launch)
    parser.flag(
        "--time-limit",
        metavar="SECONDS",
        help=f"time limit for the second step (default: {_TIME_LIMIT_S:g})",
    )
    parser.flag("--module", short="-m", is_last=True, metavar="NAME", help="run a module")
    return parser


def _rows(name: str | None, devices: planner.Devices) -> tuple[planner.Variant, ...]:
    rows = {row.name: row for row in planner.rows_for(devices.world_size)}
    if name is None:
        return tuple(rows.values())
    if name not in rows:
        close = did_you_mean(name, rows)
        raise ConfigError(
            f"invalid value {name!r} for --strategy: with {devices.world_size} rank(s), it must be "
            f"one of {', '.join(rows)}",
            where="--strategy",
            fix=f"did you mean {close!r}?" if close else "omit --strategy to see all strategies",
            code=Code.BAD_VALUE,
        )
    return (rows[name],)


def _time_limit(text: str | None) -> float:
    with suppress(ValueError):
        seconds = _TIME_LIMIT_S if text is None else float(text)
        if seconds > 0:
            return min(seconds, _MOST_SECONDS)
    raise ConfigError(
        f"invalid value {text!r} for --time-limit: not a positive number of seconds",
        where="--time-limit",
        fix="pass a number of seconds, such as --time-limit 60",
        code=Code.BAD_VALUE,
    )


def _require_use_of_gpu(
    found: Sequence[planner.RowEstimate], devices: planner.Devices, program: Program
) -> None:
    """Raise if a script uses no GPU memory, instead of reporting that the script fits."""
    if devices.kind != "cpu" and not any(item.result.peak_bytes for item in found):
        raise UsageError(
            f"{program.name} keeps its model on the CPU and uses no GPU memory",
            where=program.name,
            fix="move the model with model.to('cuda') or accelerator.prepare(model), or pass "
            "--devices cpu to estimate CPU memory",
            code=Code.NO_ESTIMATE,
        )


class Report(NamedTuple):
    trial: planner.Trial  # the script and its arguments
    devices: planner.Devices  # the devices to train on
    rows: Sequence[planner.RowEstimate]  # by strategy, cheapest first
    flags: Sequence[str] = ()  # of the launch, as passed to this command

    @property
    def chosen(self) -> planner.RowEstimate | None:
        return next((row for row in self.rows if row.fits), None)

    def launch_line(self, estimate: planner.RowEstimate) -> str:
        devices, trial = self.devices, self.trial
        words = ["headway", "launch"]
        if devices.kind == "cpu":
            words.append("--cpu")
        if devices.machines > 1:
            words += ["--num-machines", str(devices.machines)]
        if devices.per_machine > 1:
            words += ["--num-processes", str(devices.per_machine)]
        for name, value in estimate.row.settings.items():
            if value != DDP:  # the default strategy
                words.append(f"--{name.replace('_', '-')}")
                words += [value] * (value != YES)
        words += [*self.flags, *["-m"] * trial.is_module]
        return shlex.join([*words, trial.program, *trial.args])


def _show(report: Report) -> None:
    first = report.rows[0]
    program = shlex.join([report.trial.program, *report.trial.args])
    print(f"{program} on {report.devices}, {first.row.name}")
    _show_peak(report.devices, first)
    _show_rows(report)
    _show_launch(report)
    for note in dict.fromkeys(note for row in report.rows for note in row.result.notes):
        print(f"note: {note}")
    print(CHECKED)


def _show_peak(devices: planner.Devices, estimate: planner.RowEstimate) -> None:
    outcome = estimate.result
    share = f"{size(planner.MARGIN_BYTES[devices.kind])} + {planner.MARGIN_SHARE:.0%}"
    print(
        f"\npeak per rank {size(outcome.peak_bytes)}; {size(estimate.needed_bytes)} with a margin "
        f"of {share}; available {size(devices.bytes_per_rank)}: {_FITS[estimate.fits]}"
    )
    if outcome.peak_at:
        print(f"the peak occurs {outcome.peak_at}")
    whole = max(sum(outcome.categories.values()), 1)
    for name, count in outcome.categories.items():
        print(f"  {name:<13}{size(count):>12}{count / whole:>6.0%}")


def _show_rows(report: Report) -> None:
    rows: list[tuple[str, tuple[str, ...]]] = [("strategy", ("peak", "with margin", "fits"))]
    for row in report.rows:
        sizes = [size(row.result.peak_bytes), size(row.needed_bytes)]
        known = ["", ""] if row.result.failed_at else sizes
        rows.append((row.row.name, (*known, _FITS[row.fits])))
    first = max(len(name) for name, _ in rows)
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows), strict=True)]
    print()
    for name, cells in rows:
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        print("  ".join((f"{name:<{first}}", *padded)))
    for row in report.rows:
        if row.result.failed_at:
            print(f"cannot estimate {row.row.name}: {row.result.failed_at}")


def _show_launch(report: Report) -> None:
    chosen = report.chosen
    print()
    if chosen is None:
        print("no strategy is known to fit; use smaller batches or more devices")
    else:
        print(report.launch_line(chosen))
        if chosen.row.settings != {"strategy": DDP}:
            print("this requires a script that passes its model to accelerator.prepare()")
        elif report.devices.world_size > 1:
            print("this requires a script that divides its data, as accelerator.prepare() does")
