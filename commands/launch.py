"""`headway launch [flags] script.py [args]`: run a training script in one or many processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count, takewhile

from headway.commands.flags import Parsed, Parser, flag_layer, machine_from_flags, usage_error
from headway.commands.program_args import other_environment, program_from
from headway.devices.table import kind_of
from headway.errors import Code, ConfigError, Problem, WorkerFailed
from headway.ipc import signals
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import epoch_time
from headway.ipc.stderr import log, shown
from headway.launcher.clusters.cluster_settings import assigned_rank, cluster_layer, job_in
from headway.launcher.plan.build import build_plan
from headway.launcher.plan.plan import LaunchPlan, summary
from headway.launcher.plan.program import Program, interpreter
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.settings.problems import problems as settings_problems
from headway.settings.profile import Entries, Entry
from headway.settings.resolve import launch_layers, profile_layers, resolve, try_resolve
from headway.settings.setting import Seconds
from headway.settings.table import OF_JOBS, ON, TABLE, TOPICS, Settings

FOREVER = "forever"  # --wait without a number
_PLACING = [
    TABLE[name].flag for name in (*TOPICS["ranks on this machine"], *TOPICS["several machines"])
]
"""Flags that programs other than scripts rarely define themselves."""
_USAGE_ERROR = 2  # the exit code of argparse, click and most others

BRIEF = (
    *("--dry-run", "--profile", "--cpu", "--devices", "--num-processes", "--mixed-precision"),
    *("--gradient-accumulation-steps", "--strategy", "--resume", "--hosts", "--submit"),
    *("--max-restarts", "--hang-timeout", "--log-dir", "--debug-rank"),
)
"""The most common flags: `-h` lists only these."""

USAGE = """\
headway launch [flags] script.py [args of the script]
       headway launch [flags] -m module [args of the module]"""


class _Launch:
    """State of a launch, filled in by its tasks."""

    own: list[str]  # the launcher's flags, as words
    rest: list[str]  # the script and its arguments, as typed
    parsed: Parsed
    program: Program
    machine: Machine  # the machine to plan for
    environ: Mapping[str, str]  # the machine's environment variables
    profiles: Sequence[Entries]
    layers: list[Entries]  # all sources, from the weakest to the strongest
    settings: Settings  # valid except for `problems`
    plan: LaunchPlan

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = argv
        self.began_at = epoch_time()
        self.here = dict(os.environ)
        self.parser = make_parser()
        self.problems: list[Problem] = []

    @property
    def is_here(self) -> bool:
        """Whether the plan is for this machine and not for a recorded one."""
        return self.parsed.machine is None


def main(argv: Sequence[str]) -> int:
    launch = _Launch(argv)
    for task in TASKS:
        if (exit_code := task(launch)) is not None:
            return exit_code
    raise AssertionError("the last task runs the plan")


# ---------------------------------------------------------------- the tasks of a launch, in order


def _read_words(launch: _Launch) -> None:
    own, rest = launch.own, launch.rest = launch.parser.split(launch.argv)
    launch.parsed = parsed = launch.parser.parse_args(own)
    launch.program = program_from(launch.parser, parsed, own, rest)
    if not launch.is_here and not parsed.dry_run:
        raise usage_error(
            f"--machine {parsed.machine} describes another machine, where nothing can be started",
            fix="add --dry-run to see the plan for it",
            code=Code.FLAGS_CONTRADICT,
        )


def _merge_settings(launch: _Launch) -> None:
    """Detect the machine and merge the settings: flags override variables and profiles."""
    parsed = launch.parsed
    launch.profiles = profile_layers(launch.here, profile=parsed.profile)
    launch.machine, launch.environ = machine_from_flags(
        parsed, launch.here, layers=launch_layers(launch.profiles, launch.here)
    )
    flags = flag_layer(parsed)
    if parsed.submit is not None or not flags.keys().isdisjoint(OF_JOBS):
        from headway.commands.remote_job import reject_job_flags

        reject_job_flags(parsed, flags)
    if parsed.cpu:
        flags["device"] = _cpu_flag(flags.get("device"))
    launch.layers = launch_layers(launch.profiles, launch.environ, flags)


def _launch_remotely(launch: _Launch) -> int | None:
    """Submit a job or run on other hosts, if requested."""
    layers, machine, environ = launch.layers, launch.machine, launch.environ
    is_job = launch.parsed.submit is not None
    if not is_job and not any("hosts" in layer for layer in layers):
        return None
    from headway.commands.remote_job import RemoteJob

    request = RemoteJob(launch.parsed, launch.own, launch.program, layers, machine, environ)
    if is_job:
        from headway.commands.submit import submit

        return submit(request)
    settings = resolve(layers, machine, environ)
    if not settings.hosts:
        return None
    from headway.commands.over_ssh import launch_over_ssh

    return launch_over_ssh(request, settings.hosts, settings)


def _become_step(launch: _Launch) -> int | None:
    """In a SLURM job, replace this process with a job step on all machines of the job.

    A dry run only prints the step.
    """
    parsed, environ = launch.parsed, launch.environ
    cluster = cluster_layer(environ, launch.layers)
    launch.settings, launch.problems = settings, problems = try_resolve(
        launch.layers, launch.machine, environ, cluster
    )
    # problems are reported when the plan is built
    if not cluster or not launch.is_here or problems or settings_problems(settings):
        return None
    from headway.launcher.clusters.slurm import run_step, step_of

    typed = [*launch.own, *launch.rest]
    words = [word for word in typed if word.replace("_", "-") != "--dry-run" or not parsed.dry_run]
    command = [*interpreter(), "-m", "headway", "launch", *words]
    step = step_of(environ, settings, command, has_terminal=os.isatty(1))
    if step is None:
        return None
    if not parsed.dry_run:
        if not parsed.quiet:
            machines = f"{step.num_machines} machine" + "s" * (step.num_machines > 1)
            log(f"starting a step of job {step.job} on {machines}")
        run_step(step)
    from headway.commands.tables import escape_unencodable
    from headway.launcher.plan.describe import describe_step

    escape_unencodable()
    print(describe_step(settings, step.command, parsed.show_secrets))
    return 0


def _wait_for_gpus(launch: _Launch) -> None:
    """Find idle GPUs if the settings request them, and claim them unless this is a dry run."""
    settings, parsed = launch.settings, launch.parsed
    if kind_of(settings.device).is_numbered and settings.devices.idle is not None:
        if launch.is_here:
            launch.machine = _find_idle_gpus(launch)
    elif parsed.wait is not None and not settings_problems(settings, launch.machine):
        asked = settings.devices.idle is not None
        raise ConfigError(
            f"--wait waits for idle GPUs, but devices is {str(settings.devices)!r} on "
            f"{settings.device}",
            where=f"flag --wait; devices: {settings.origin('devices')}",
            fix="remove --wait" + ", or request idle GPUs with --devices idle:2" * (not asked),
            code=Code.FLAGS_CONTRADICT,
        )


def _make_plan(launch: _Launch) -> None:
    """Build the plan, or raise all problems at once."""
    settings, parsed, problems = launch.settings, launch.parsed, launch.problems
    if launch.is_here and settings.log_dir is not None:
        from headway.launcher.processes.log_folder import log_dir_problems

        problems += log_dir_problems(settings)
    plan = build_plan(
        settings,
        launch.machine,
        launch.program,
        python=interpreter(),
        environ=launch.environ,
        supervise=parsed.supervise,
        in_process=parsed.in_process,
        began_at=0.0 if parsed.dry_run else launch.began_at,
        problems=problems,
        task=None if problems else assigned_rank(launch.environ, settings),
        job="" if problems else job_in(launch.environ, settings),
    )
    stronger = _overridden(launch.profiles) if parsed.profile else []
    others = other_environment(plan.program.name, plan.python[0], launch.environ)
    if any(name.startswith("PET_") for name in launch.environ):
        from headway.commands.flag_aliases import torchrun_note

        stronger += torchrun_note(launch.environ)
    launch.plan = plan._replace(notes=(*plan.notes, *stronger, *others))


def _overridden(layers: Sequence[Entries]) -> list[str]:
    """Return a note for each value of the first layer that a later layer overrides."""
    return [
        f"{name} from {entry.origin} is overridden by {stronger[name].origin}"
        for name, entry in (layers[0] if layers else {}).items()
        for stronger in layers[1:]
        if name in stronger and stronger[name].raw != entry.raw and name != "env"
    ]


def _print_plan(launch: _Launch) -> int | None:
    """Print the whole plan for a dry run, otherwise a one-line summary."""
    plan, parsed = launch.plan, launch.parsed
    if parsed.dry_run:
        from headway.commands.tables import escape_unencodable
        from headway.launcher.plan.describe import describe

        escape_unencodable()
        if not plan.is_one_machine:
            from headway.launcher.multinode.preflight import describe_run_key

            plan = plan._replace(notes=(*plan.notes, describe_run_key(launch.environ)))
        print(describe(plan, parsed.show_secrets))
        return 0
    if plan.supervised is not None:  # sbatch --signal=USR1@60 may send them
        signals.trap(signals.log_early_stop, signal.SIGUSR1, signal.SIGUSR2)
    for note in plan.notes:
        log(f"note: {note}")
    if not (parsed.quiet or plan.reports_elsewhere):
        log(summary(plan))
        program, text = plan.program, plan.program.text
        flags = launch.parser.known if text else _PLACING
        if note := _misplaced_flags(program, flags, text):
            log(f"note: {note}")
        if not (plan.is_rank or program.is_asked_for_help) and program.mentions_rank:
            flag = TABLE["num_processes"].as_flag(1)
            what = f"{shown(program.name)} mentions RANK, which is not set for one process"
            log(f"note: {what}; pass {flag} to set it")
    return None


def _run(launch: _Launch) -> int:
    from headway.launcher.run import run

    if os.getpid() == 1:
        from headway.launcher.pid_1 import leave_pid_1

        leave_pid_1()
    plan, environ = launch.plan, launch.environ
    is_quiet = launch.parsed.quiet or plan.reports_elsewhere
    start = None
    if plan.settings.record == ON and plan.is_first:
        from headway.commands.launch_record import launch_record

        start = partial(launch_record, plan, [*launch.own, *launch.rest], os.getpid())
    try:
        return run(plan, environ, is_quiet=is_quiet, start=start)
    except WorkerFailed as failed:
        if failed.exit_code == _USAGE_ERROR:
            failed.note = _misplaced_flags(plan.program, launch.parser.known)
        raise


TASKS: tuple[Callable[[_Launch], int | None], ...] = (
    _read_words,
    _merge_settings,
    _launch_remotely,
    _become_step,
    _wait_for_gpus,
    _make_plan,
    _print_plan,
    _run,
)
"""The tasks of a launch, in order; the first task that returns an exit code ends the launch."""


def _find_idle_gpus(launch: _Launch) -> Machine:
    """Return the machine with its current GPU usage; claim idle GPUs unless this is a dry run."""
    from headway.ipc.stderr import waiting_for
    from headway.launcher.processes.gpu_claims import claim_idle, with_claims

    settings, parsed, environ = launch.settings, launch.parsed, launch.environ
    looks = count()

    def poll() -> Machine:
        with waiting_for("the GPU usage to be read", is_quiet=next(looks) > 0):
            return detect_machine(environ, full=True)

    if parsed.dry_run:
        return with_claims(detect_machine(environ, full=True))
    found = [*launch.problems, *settings_problems(settings)]
    if found:  # before a long wait, not after it
        raise ConfigError.of(found)
    return claim_idle(settings, poll, None if parsed.wait is None else _seconds(parsed.wait))


def _seconds(text: str) -> float:
    if text == FOREVER:
        return float("inf")
    try:
        return Seconds(0)(text)
    except ValueError as error:
        raise ConfigError(
            f"invalid value {text!r} for --wait: {error}",
            where="flag --wait",
            fix="pass a number of seconds, such as --wait=600, or --wait without a value",
            code=Code.BAD_VALUE,
        ) from None


def make_parser() -> Parser:
    parser = Parser(
        "launch",
        "Run a training script in one or many processes, on one or several machines. "
        "All arguments after the script are passed to it.",
        usage=USAGE,
    )
    parser.flag(
        "--module", short="-m", metavar="MODULE", is_last=True, help="run a module, like python -m"
    )
    parser.flag("--no-python", help="run a program that is not a Python script")
    parser.flag(
        "--quiet", short="-q", help="do not print the plan's summary or waiting messages at startup"
    )
    plan = "plan"
    parser.flag(
        "--dry-run",
        heading=plan,
        help="print the plan, with the origin of each value, without starting it",
    )
    parser.shared_flags("--show-secrets", "--profile", "--machine", heading=plan)
    device, ranks, *_ = TOPICS
    parser.flag("--cpu", heading=device, help="alias for --device cpu")
    parser.flag(
        "--wait",
        heading=device,
        metavar="S",
        default_value=FOREVER,
        help="with --devices idle:N, wait until N GPUs are idle, for at most S seconds",
    )
    parser.flag(
        "--supervise", heading=ranks, help="run a single process as one rank under the launcher"
    )
    parser.flag(
        "--in-process",
        heading=ranks,
        help="run a single process in this interpreter, for an IDE's debugger",
    )
    parser.setting_flags()
    parser.flag(
        "--submit",
        heading="jobs",
        metavar="{slurm}",
        help="submit the launch as a job to this scheduler",
    )
    parser.brief = BRIEF
    return parser


def _misplaced_flags(program: Program, flags: Collection[str], text: bytes = b"") -> str:
    """Return a note about Headway's flags after the script that its text lacks; may be empty."""
    words = takewhile(lambda word: word not in ("--", "--help"), program.args)
    names = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
    ours = [name for name in names if name.replace("_", "-") in flags and name.encode() not in text]
    if not ours:
        return ""
    come, were = ("comes", "was") if len(ours) == 1 else ("come", "were")
    return (
        f"{', '.join(ours)} {come} after {program.name} and {were} passed to it; "
        "put flags of headway launch before the script"
    )


def _cpu_flag(device: Entry | None) -> Entry:
    if device is not None and str(device.raw).strip().lower() != "cpu":
        raise usage_error(
            f"--cpu and --device {device.raw} cannot be used together",
            fix="pass only one of them",
            code=Code.FLAGS_CONTRADICT,
        )
    return Entry("cpu", Origin(Layer.FLAG, flag="--cpu"))
