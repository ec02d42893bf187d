"""`headway estimate script.py [args]`: how much memory each rank will take, before it is run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from headway.commands.flags import Parsed, Parser
from headway.commands.program import program_from
from headway.contract.precisions import PRECISIONS
from headway.contract.run import ACCELERATE
from headway.errors import ConfigError, UsageError, did_you_mean
from headway.estimate.attempt import Attempt, Outcome
from headway.estimate.devices import Devices, devices_of, parse_devices
from headway.estimate.planner import BatchSizes, Planner, Row, rows_for
from headway.estimate.report import Report, as_data, failure, show
from headway.launcher.planning.program import Program, interpreter
from headway.launcher.reporting.waiting import waiting_for
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.machine.snapshot import load_machine

COUNTED = ("mixed_precision", "gradient_accumulation_steps")
"""The settings of a launch that count for memory, beside those of the strategies."""

_TIME_LIMIT_S = 300.0
_MOST_SECONDS = 1e9  # timers of every system can be set to as much

EXAMPLES = """
The script runs unmodified up to its second optimizer step, without memory, GPU or network: its
tensors have shapes and no values. It changes no file, starts no program and reaches no network.

  headway estimate --devices 8xH100-80GB train.py
  headway estimate --devices 2x8xA100-40GB --batch-size --bs=8,16,32 train.py --bs 8

DEVICES are [MACHINESx][COUNTx]NAME[-MEMORY]: 8xH100-80GB, 2x8xA100-40GB, RTX4090, 24GB, 4xcpu.
"""


def main(argv: Sequence[str]) -> int:
    """Run `headway estimate` with these words and return the exit code."""
    parser = make_parser()
    own, rest = parser.split(argv)
    parsed = parser.parse_args(own)
    parsed.no_python = False
    program = program_from(parsed, rest)
    devices = _devices(parsed)
    batches = None if parsed.batch_size is None else parse_batch_sizes(parsed.batch_size)
    attempt = attempt_at(program, devices)._replace(time_limit_s=_time_limit(parsed.time_limit))
    rows = _rows(parsed.strategy, devices)
    given = {name: getattr(parsed, name) for name in COUNTED}
    with (
        waiting_for("the script's first two optimizer steps, without memory"),
        Planner(interpreter(), {**os.environ, **variables_for(given)}) as planner,
    ):
        found = [planner.judge(row, attempt, devices, batches) for row in rows]
    if not found[0].outcome.rung:
        said = failure(one.outcome for one in found)
        raise UsageError(
            f"the script could not be followed: {found[0].outcome.failed_at}",
            where=f"{program.name}; its last lines:\n{said}" if said else program.name,
            fix="let the script make an optimizer step, with these arguments and devices, without"
            " what failed there",
        )
    require_use_of_gpu([one.outcome for one in found], devices, program)
    report = Report(attempt, devices, [one for one in found if one.outcome.rung], batches)
    if parsed.json:
        print(json.dumps(as_data(report), indent=2))
    else:
        show(report)
    return int(all(one.fits is None for one in report.rows))


def require_use_of_gpu(outcomes: Sequence[Outcome], devices: Devices, program: Program) -> None:
    """Refuse to say that a script fits into a GPU on which it puts nothing.

    Raises:
        UsageError: the script was followed, and left all that it trains on the CPU.
    """
    followed = [one for one in outcomes if one.rung]
    if devices.kind != "cpu" and followed and not any(one.peak_bytes for one in followed):
        raise UsageError(
            f"{program.name} leaves its model on the CPU: it takes no memory of a GPU",
            where=program.name,
            fix="let the script move its model, by model.to('cuda') or accelerator.prepare(model); "
            "or pass --devices cpu for the memory that it takes there",
        )


def attempt_at(program: Program, devices: Devices) -> Attempt:
    """Return an attempt at a program on these devices."""
    return Attempt(
        program=program.name,
        args=program.args,
        is_module=program.kind == "module",
        device=devices.kind,
        device_name=devices.name,
        device_bytes=devices.memory_bytes,
        world_size=devices.world_size,
        local_world_size=devices.per_machine,
    )


def make_parser() -> Parser:
    """Return the parser of the command's flags."""
    parser = Parser(
        "estimate",
        "Say how much memory a training script takes on each rank, and which settings fit.",
        usage="headway estimate [flags] script.py [args]",
        appendix=EXAMPLES,
    )
    parser.flag("--devices", metavar="DEVICES", help="what it is to be trained on (default: here)")
    parser.flag(
        "--machine",
        metavar="FILE",
        help="the devices of the machine that `headway env --json` wrote to FILE",
    )
    parser.flag("--strategy", metavar="NAME", help="only this row of the table")
    parser.flag(
        "--batch-size",
        metavar="FLAG=SIZES",
        help="the script's own flag for its batch size, and sizes to try: --bs=8,16,32",
    )
    parser.flag(
        "--mixed-precision",
        metavar="NAME",
        choices=list(PRECISIONS),
        help="as for headway launch; for scripts with an Accelerator",
    )
    parser.flag(
        "--gradient-accumulation-steps",
        metavar="N",
        help="as for headway launch; for scripts with an Accelerator",
    )
    parser.flag(
        "--time-limit",
        metavar="SECONDS",
        help=f"stop a script that makes no second step (default: {_TIME_LIMIT_S:g})",
    )
    parser.flag("--json", help="print one JSON object; sizes are in bytes")
    parser.flag("--module", short="-m", is_last=True, metavar="NAME", help="run a module")
    return parser


def parse_batch_sizes(text: str) -> BatchSizes:
    """Return the flag and sizes in `--bs=8,16,32`.

    Raises:
        ConfigError: it has another form.
    """
    flag, _, listed = text.rpartition("=")
    sizes = listed.split(",")
    if not flag or not all(one.isdecimal() and int(one) for one in sizes):
        raise ConfigError(
            f"batch sizes are {text!r}, which is not of the form FLAG=SIZES",
            where="--batch-size",
            fix="name the script's own flag: --batch-size --batch-size=8,16,32",
        )
    return BatchSizes(flag, tuple(sorted(map(int, sizes))))


def _devices(parsed: Parsed) -> Devices:
    if parsed.devices is not None and parsed.machine is not None:
        raise ConfigError(
            "--devices and --machine both say what the script is to be trained on",
            where="the command line",
            fix="pass one of them",
        )
    machine: Machine = (
        detect_machine(full=True) if parsed.machine is None else load_machine(parsed.machine)
    )
    return devices_of(machine) if parsed.devices is None else parse_devices(parsed.devices, machine)


def _rows(name: str | None, devices: Devices) -> tuple[Row, ...]:
    rows = rows_for(devices.world_size, devices.kind)
    chosen = tuple(row for row in rows if name in (None, row.name))
    if name is not None and not chosen:
        names = [row.name for row in rows]
        close = did_you_mean(name, names)
        raise ConfigError(
            f"strategy is {name!r}, not one of {', '.join(names)} for {devices.world_size} rank(s)",
            where="--strategy",
            fix=f"did you mean {close!r}?" if close else "leave it out to see all",
        )
    return chosen


def _time_limit(text: str | None) -> float:
    try:
        seconds = _TIME_LIMIT_S if text is None else float(text)
        if 0 < seconds <= _MOST_SECONDS:
            return seconds
    except ValueError:
        pass
    raise ConfigError(
        f"time limit is {text!r}, not a number of seconds up to {_MOST_SECONDS:g}",
        where="--time-limit",
        fix="pass such as --time-limit 60",
    )


def variables_for(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the variables by which an Accelerator gets these settings; those of None are none."""
    given = {ACCELERATE[name]: value for name, value in settings.items() if value is not None}
    return {name: str(value) for name, value in given.items()}
