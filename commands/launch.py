"""`headway launch [flags] script.py [args]`: run a training script in one or many processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, takewhile
from typing import NamedTuple

from headway.commands.flags import Parsed, Parser, flag_layer, machine_from_flags
from headway.commands.program import program_from
from headway.commands.remote_options import (
    Request,
    add_flags_of_jobs,
    nodes_flag,
    refuse_flags_of_jobs,
)
from headway.commands.resume_check import resume_problems
from headway.commands.tables import escape_unencodable
from headway.contract.notes import say
from headway.contract.origin import Layer, Origin
from headway.devices.table import kind_of
from headway.errors import ConfigError, HeadwayError, Problem, Stopped, WorkerFailed
from headway.launcher.clusters.cluster import cluster_layer, task_of
from headway.launcher.planning.plan import LaunchPlan, build_plan
from headway.launcher.planning.program import Program, interpreter
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.settings.layers import launch_layers, overridden, profile_layers
from headway.settings.problems import problems as settings_problems
from headway.settings.profile import Entries, Entry
from headway.settings.resolve import resolve, try_resolve
from headway.settings.setting import Seconds
from headway.settings.table import OF_HOSTS, Settings

FOREVER = "forever"  # --wait without a number
_USAGE_ERROR = 2  # the exit code of argparse, click and most others

USAGE = """\
headway launch [flags] script.py [args of the script]
       headway launch [flags] -m module [args of the module]"""


class _Ready(NamedTuple):
    """A launch of which nothing has started yet.

    Args:
        plan: it.
        parsed: its flags.
        environ: what its processes inherit, before the plan's changes.
    """

    plan: LaunchPlan
    parsed: Parsed
    environ: Mapping[str, str]


def main(argv: Sequence[str], *, tells_machines: bool = True) -> int:
    """Run `headway launch` with these words and return the exit code.

    Args:
        argv: the words.
        tells_machines: the error of a launch that fails before it joins the others is to tell them,
            once it is reported; no, where the caller ends them.
    """
    parser = make_parser()
    environ = dict(os.environ)
    try:
        ready = _prepare(argv, parser, began_at=time.time())
        return ready if isinstance(ready, int) else _run(ready, parser, tells_machines)
    except (HeadwayError, KeyboardInterrupt) as caught:
        error = caught if isinstance(caught, (HeadwayError, Stopped)) else Stopped(signal.SIGINT)
        if tells_machines and not error.peers_notified:
            error.on_reported = partial(_give_up, argv, parser, environ, error)
        raise error from None
    finally:
        from headway.launcher.early_signals import stop_as_usual

        stop_as_usual()


def _give_up(
    argv: Sequence[str],
    parser: Parser,
    environ: Mapping[str, str],
    error: HeadwayError | Stopped,
) -> None:
    from headway.commands.notify_abort import give_up

    give_up(argv, parser, environ, error)


def _prepare(argv: Sequence[str], parser: Parser, began_at: float) -> _Ready | int:
    """Return what is to be started here; the exit code, where that is nothing."""
    own, rest = parser.split(argv)
    parsed = parser.parse_args(own)
    if parsed.num_machines is not None:  # others may wait for this machine already
        from headway.launcher.early_signals import raise_stopped

        raise_stopped()
    if not rest and own:
        _refuse_script_as_value(own[-1])
    program = program_from(parsed, rest[1:] if rest[:1] == ["--"] else rest)
    if parsed.machine is not None and not parsed.dry_run:
        raise ConfigError(
            f"--machine {parsed.machine} describes another machine: nothing can be started there",
            where="the command line",
            fix="add --dry-run to see the plan for it",
        )
    here = dict(os.environ)
    refuse_flags_of_jobs(parsed)
    machine, environ = machine_from_flags(parsed, here)
    flags = dict(flag_layer(parsed))
    if parsed.cpu:
        flags["device"] = _cpu_flag(flags.get("device"))
    if parsed.nodes is not None:
        flags["num_machines"] = nodes_flag(parsed.nodes, flags.get("num_machines"))
    profiles = profile_layers(here, profile=parsed.profile)
    layers = launch_layers(profiles, environ, flags)
    request = Request(parsed, own, program, layers, machine, environ)
    if parsed.submit is not None:
        from headway.commands.submit import submit

        return submit(request)
    if any(name in layer for layer in layers for name in OF_HOSTS):
        from headway.commands.over_ssh import hosts_of, launch_over_ssh

        settings = resolve(layers, machine, environ)
        if hosts := hosts_of(settings):
            return launch_over_ssh(request, hosts, settings)
    cluster = cluster_layer(environ, layers)

    def resolved(some: Sequence[Entries]) -> Settings:
        return resolve(some, machine, environ, cluster)

    if cluster and parsed.machine is None:
        settings, problems = try_resolve(layers, machine, environ, cluster)
        if not problems and _became_step(settings, environ, [*own, *rest], parsed):
            return 0
    adaptations: list[str] = []
    if parsed.fit:
        from headway.launcher.planning.fit import fit

        if parsed.machine is None and _wants_idle(resolved(layers)):
            machine = _with_use(environ)
        layers, adaptations = fit(layers, machine, resolved)
    settings, problems = try_resolve(layers, machine, environ, cluster)
    estimated_bytes = None
    if parsed.fit_memory and not (problems or settings_problems(settings, machine)):
        from headway.commands.fit_memory import fit_memory

        seen = machine if parsed.machine is not None else detect_machine(environ, full=True)
        fitted = fit_memory(settings, seen, program, python=interpreter(), environ=environ)
        adaptations.append(fitted.note)
        estimated_bytes = fitted.estimated_bytes
        settings, problems = try_resolve([*layers, fitted.entries], machine, environ, cluster)
    if _wants_idle(settings):
        if parsed.machine is None:
            machine = _look_for_idle_gpus(settings, problems, parsed, environ)
    elif parsed.wait is not None and not settings_problems(settings, machine):
        asked = settings.devices.idle is not None
        raise ConfigError(
            f"--wait waits for idle GPUs, and devices is {str(settings.devices)!r} on "
            f"{settings.device}",
            where=f"flag --wait; devices: {settings.origin('devices')}",
            fix="leave --wait out" + ", or ask for them with --devices idle:2" * (not asked),
        )
    if parsed.machine is None:
        from headway.launcher.starting.log_folder import log_dir_problems

        problems += log_dir_problems(settings) + resume_problems(settings)
    task = None if problems else task_of(environ, settings)
    plan = build_plan(
        settings,
        machine,
        program,
        python=interpreter(),
        environ=environ,
        supervise=parsed.supervise,
        in_process=parsed.in_process,
        began_at=0.0 if parsed.dry_run else began_at,
        problems=problems,
        task=task,
        estimated_bytes=estimated_bytes,
    )
    stronger = overridden(profiles) if parsed.profile else []
    plan = plan._replace(notes=(*adaptations, *plan.notes, *stronger))
    if parsed.dry_run:
        from headway.launcher.planning.describe import describe

        escape_unencodable()
        if not plan.is_one_machine:
            from headway.launcher.clusters.channel.run_key import describe_run_key

            plan = plan._replace(notes=(*plan.notes, describe_run_key(environ)))
        print(describe(plan, parsed.show_secrets))
        return 0
    return _Ready(plan, parsed, environ)


def _run(ready: _Ready, parser: Parser, tells_machines: bool) -> int:
    plan, parsed, environ = ready
    from headway.launcher.early_signals import outlive_early_signals, raise_stopped
    from headway.launcher.run import run

    tell = None
    if plan.supervised is not None:
        outlive_early_signals()
    if plan.supervised is not None and tells_machines and not plan.is_one_machine:
        from headway.launcher.clusters.abort_notice import tell_machines

        tell = partial(tell_machines, plan.settings, environ)
        raise_stopped()
    is_quiet = parsed.quiet or plan.is_told_elsewhere
    _announce(plan, is_quiet)
    try:
        return run(plan, environ, is_quiet=is_quiet, tell=tell)
    except WorkerFailed as failed:
        if failed.exit_code == _USAGE_ERROR:
            failed.note = _misplaced_flags(plan.program, parser)
        raise


def _refuse_script_as_value(flag: str) -> None:
    """Refuse a last flag whose value is a file, where no script follows."""
    name, _, value = flag.partition("=")
    if name != "--module" and os.path.isfile(value):
        raise ConfigError(
            f"no script given: {name} has taken {value!r} as its value",
            where="the command line",
            fix=f"write the value of {name} before the script",
        )


def _became_step(
    settings: Settings, environ: Mapping[str, str], argv: Sequence[str], parsed: Parsed
) -> bool:
    """Become a step of SLURM's job, where one is needed for all machines; a dry run prints it."""
    if settings_problems(settings):
        return False  # the plan will tell
    from headway.launcher.clusters.srun import run_step, step_of

    words = [word for word in argv if word.replace("_", "-") != "--dry-run" or not parsed.dry_run]
    command = [*interpreter(), "-m", "headway", "launch", *words]
    step = step_of(environ, settings, command, has_terminal=os.isatty(1))
    if step is not None and parsed.dry_run:
        from headway.launcher.planning.describe import describe_step

        escape_unencodable()
        print(describe_step(settings, step.command, parsed.show_secrets))
    elif step is not None:
        if not parsed.quiet:
            machines = f"{step.num_machines} machine" + "s" * (step.num_machines > 1)
            _print_notes([f"a step of job {step.job}, on {machines}"])
        run_step(step)
    return step is not None


def _wants_idle(settings: Settings) -> bool:
    return kind_of(settings.device).is_numbered and settings.devices.idle is not None


def _with_use(environ: Mapping[str, str]) -> Machine:
    """Return this machine with the current use of its GPUs and the claims on them."""
    from headway.launcher.starting.gpu_claims import with_claims

    return with_claims(detect_machine(environ, full=True))


def _look_for_idle_gpus(
    settings: Settings, problems: Sequence[Problem], parsed: Parsed, environ: Mapping[str, str]
) -> Machine:
    """Return the machine with the current use of its GPUs; a real launch claims those it uses."""
    from headway.launcher.reporting.waiting import waiting_for
    from headway.launcher.starting.gpu_claims import claim_idle

    looks = count()

    def look() -> Machine:
        with waiting_for("the use of the GPUs to be read", is_quiet=next(looks) > 0):
            return detect_machine(environ, full=True)

    if parsed.dry_run:
        return _with_use(environ)
    found = [*problems, *settings_problems(settings)]
    if found:  # before a long wait, not after it
        raise ConfigError.of(found)
    wait_s = None if parsed.wait is None else _seconds(parsed.wait)
    return claim_idle(settings, look, wait_s)


def _seconds(text: str) -> float:
    if text == FOREVER:
        return float("inf")
    try:
        return Seconds(0)(text)
    except ValueError as error:
        raise ConfigError(
            f"--wait is {text!r}, {error}",
            where="flag --wait",
            fix="write --wait=600, or --wait alone for no limit",
        ) from None


def _is_wait(text: str) -> bool:
    try:
        return _seconds(text) >= 0
    except ConfigError:
        return False


def make_parser() -> Parser:
    """Return the parser of the launcher's own flags."""
    parser = Parser(
        "launch",
        "Run a training script in one or many processes on this machine, or on several. "
        "Everything after the script belongs to the script.",
        usage=USAGE,
    )
    parser.flag(
        "--module",
        short="-m",
        metavar="MODULE",
        is_last=True,
        help="run a module, as python -m does",
    )
    parser.flag("--no-python", help="run a program that is not a Python script")
    parser.flag("--cpu", help="the same as --device cpu")
    parser.flag("--supervise", help="run a single process as one rank under the launcher")
    parser.flag(
        "--in-process", help="run a single process in this interpreter, for an IDE's debugger"
    )
    parser.flag(
        "--dry-run", help="print the plan, with the origin of each value, and start nothing"
    )
    parser.secrets_flag()
    parser.machine_flag()
    parser.flag(
        "--fit", help="adapt profile and environment to this machine, and print what changes"
    )
    parser.flag(
        "--fit-memory",
        help="train with the cheapest strategy that `headway estimate` says fits: ddp before fsdp "
        "before activation checkpointing before offloading",
    )
    parser.flag(
        "--wait",
        metavar="S",
        default_value=FOREVER,
        reads=_is_wait,
        help="with --devices idle:N, wait until N GPUs are idle; at most S seconds",
    )
    parser.flag(
        "--quiet",
        short="-q",
        help="at the start, print neither the plan's summary nor what is waited for",
    )
    parser.profile_flag()
    add_flags_of_jobs(parser)
    parser.setting_flags()
    return parser


def _misplaced_flags(program: Program, parser: Parser) -> str:
    """Return the note for a script that was given flags of `headway launch`; empty if none was."""
    words = takewhile(lambda word: word != "--", program.args)
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    flags = {*parser.known} - {"--help"}
    ours = [name for name in dict.fromkeys(names) if name.replace("_", "-") in flags]
    if not ours:
        return ""
    stand, were = ("stands", "was") if len(ours) == 1 else ("stand", "were")
    return (
        f"{', '.join(ours)} {stand} after {program.name} and {were} passed to it; "
        "flags of headway launch go before the script"
    )


def _cpu_flag(device: Entry | None) -> Entry:
    if device is not None and str(device.raw).strip().lower() != "cpu":
        raise ConfigError(
            f"--cpu and --device {device.raw} contradict each other",
            where="the command line",
            fix="pass one of the two",
        )
    return Entry("cpu", Origin(Layer.FLAG, flag="--cpu"))


def _announce(plan: LaunchPlan, is_quiet: bool) -> None:
    lines = [f"note: {note}" for note in plan.notes]
    if not is_quiet:
        from headway.launcher.planning.summary import summary

        lines.append(summary(plan))
    _print_notes(lines)


def _print_notes(lines: Sequence[str]) -> None:
    for line in lines:
        say(line)
