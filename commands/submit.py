"""`headway launch --submit slurm`: submit the launch as a SLURM job."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from headway.commands.flags import Parsed
from headway.commands.remote_job import Relocated, RemoteJob, check_everywhere, job_args, relocate
from headway.devices.table import kind_of
from headway.errors import Code, ConfigError, HeadwayError, MachineError
from headway.history.store import COPIED_FROM, Commit, git, read_commit
from headway.ipc.origin import Layer
from headway.ipc.run_contract import CODE_VARIABLE
from headway.ipc.secrets import masked_command, masked_line, masked_pairs
from headway.ipc.stderr import log
from headway.ipc.typed import plain
from headway.launcher.plan.program import Program, interpreter
from headway.launcher.remote.protocol import RUN_VARIABLES
from headway.launcher.remote.slurm_jobs import batch_script, sbatch_words
from headway.launcher.remote.slurm_jobs import submit as sbatch
from headway.machine.facts import Machine
from headway.settings.profile import VARIABLE as PROFILE_VARIABLE
from headway.settings.profile import Entries, shown
from headway.settings.resolve import environment_layer, resolve
from headway.settings.table import OF_JOBS, OF_MACHINES, OFF, TABLE, Settings

_MAX_BYTES = 50 * 2**20  # maximum size of a snapshot
_FOLDER = "headway-jobs"  # for snapshots and logs, unless log_dir is set
_SET_BY_SLURM = OF_MACHINES[1:]
_SAVING_S = 90  # between the stop signal and the time limit, in addition to the grace period
_EARLIER_S = 60  # SLURM may send a signal this much earlier
_START_S = 60  # for a job to start, before it has anything to save
_HERE = {"--submit", "--dry-run", "--show-secrets", *OF_JOBS, "num_machines"}
"""Flags and settings that are used only here, and are not passed to the launch in the job."""

_LATE = "the job will run the code that exists when it starts"
_ENV = TABLE["env"]
_GPUS = ("gres", "gpus", "gpus-per-node", "gpus-per-task")
_CORES = ("cpus-per-task", "cpus-per-gpu", "exclusive")


class _JobEnv(NamedTuple):
    written: Mapping[str, str]  # set by the batch script
    forwarded_env: Mapping[str, str]  # sbatch's environment, including the secrets
    secrets: Sequence[str]  # the names of the variables with secrets


def submit(request: RemoteJob) -> int:
    """Submit the launch and return the exit code.

    Raises ConfigError for an error that all machines would report, and LaunchError if sbatch fails.
    """
    parsed, own, program, layers, machine, environ = request
    settings = _resolved(layers, machine, environ)
    _reject_local_flags(parsed, settings)
    name = re.sub(r"[^\w.-]", "_", os.path.splitext(os.path.basename(program.name))[0])
    folder = os.path.abspath(settings.log_dir or _FOLDER)
    options = _options(settings, name, folder)
    inherited = _inherited(parsed, environ, options)
    into = os.path.join(folder, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    frozen = _snapshot(request, settings, into, inherited)
    program, written = frozen.program, {**inherited.written, **frozen.variables}
    words = _words(own, program)
    if parsed.dry_run and not parsed.show_secrets:
        words = masked_command(words)
    command = [*interpreter(), "-m", "headway", "launch", *words]
    script = batch_script(options, written, command)
    _print_notes(options, inherited, program, is_quiet=parsed.quiet)
    if parsed.dry_run:
        print(script, end="")
        return 0
    _make_folder(folder, settings)
    try:
        job = sbatch(script, sbatch_words(options), inherited.forwarded_env)
    except HeadwayError:
        shutil.rmtree(into, ignore_errors=True)
        raise
    if not job:
        log("note: submitted, but sbatch printed no job id; `squeue --me` lists your jobs")
        return 0
    print(job)
    log(f"submitted; `headway logs --follow {job}` shows its output, `scancel {job}` cancels it")
    return 0


def _snapshot(request: RemoteJob, settings: Settings, into: str, inherited: _JobEnv) -> Relocated:
    """Copy the program's code into `into`; return the copied program and its variables."""
    program, folder, written = request.program, os.getcwd(), inherited.written
    if settings.snapshot == OFF:
        return Relocated(program, {})
    script = program.path
    commit = read_commit(os.path.dirname(script) or folder)
    if commit is None:
        _note(request, f"the script is not in a git commit: {_LATE}")
        return Relocated(program, {})
    name = os.path.relpath(os.path.realpath(script), commit.root)
    if script and name not in _files_of(commit.root):
        _note(request, f"git ignores the script: {_LATE}")
        return Relocated(program, {})
    if request.parsed.dry_run:
        _note(request, "the job will run a snapshot of the code, taken at submission")
        return Relocated(program, {})
    code = _copy(commit, os.path.dirname(into), into)
    values = {name: text for name, text in _profile_variables(request) if name not in written}
    frozen = relocate(program, folder, commit.root, code)
    in_place = "--set snapshot=off runs it in place"
    _note(
        request,
        f"the job runs a snapshot of the code, {shown(code)}, and reads other files when it runs "
        f"({in_place})",
    )
    return frozen._replace(variables={**values, **frozen.variables, CODE_VARIABLE: code})


def _copy(commit: Commit, without: str, into: str) -> str:
    """Copy the code of a repository into a new folder and return the path of the copy.

    The folder `without` is skipped, even if git does not ignore it. Raises ConfigError if the code
    is too large.
    """
    root = commit.root
    skipped = os.path.relpath(without, root) + os.sep
    sizes = {
        name: os.lstat(os.path.join(root, name)).st_size
        for name in _files_of(root)
        if not name.startswith(skipped)
    }
    if (total := sum(sizes.values())) > _MAX_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise ConfigError(
            f"the code is {total >> 20} MiB in {len(sizes)} files, but a snapshot is limited to "
            f"{_MAX_BYTES >> 20} MiB; largest: {largest} ({sizes[largest] / 2**20:.1f} MiB)",
            where=root,
            fix="add files that are not code to .gitignore, or pass --set snapshot=off to run the "
            "code in place",
            code=Code.JOB,
        )
    code = os.path.join(into, "code")
    try:
        os.makedirs(code)
        for name in sizes:
            target = os.path.join(code, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with suppress(FileNotFoundError):  # it was removed in the meantime
                shutil.copy2(os.path.join(root, name), target, follow_symlinks=False)
        with open(os.path.join(into, COPIED_FROM), "w", encoding="utf-8") as file:
            json.dump(plain(commit), file)
    except OSError as error:
        shutil.rmtree(into, ignore_errors=True)
        raise MachineError(
            f"the code could not be copied for the job: {error.strerror}",
            where=error.filename or into,
            fix="free some space, or submit with --set snapshot=off",
            code=Code.JOB,
        ) from None
    return code


def _files_of(root: str) -> list[str]:
    """Return tracked files, also those in submodules, and other files that git does not ignore."""
    words = ("ls-files", "-z")
    tracked = git(root, *words, "--recurse-submodules") or ""
    others = git(root, *words, "--others", "--exclude-standard") or ""
    names = dict.fromkeys((tracked + others).split("\0")[:-1])
    paths = {name: os.path.join(root, name) for name in names}
    return [name for name, at in paths.items() if os.path.islink(at) or os.path.isfile(at)]


def _note(request: RemoteJob, text: str) -> None:
    if not request.parsed.quiet:
        log(f"note: {text}")


def _profile_variables(request: RemoteJob) -> Iterator[tuple[str, str]]:
    """Yield the profiles' settings as variables, except `env`, which may contain secrets."""
    for layer in request.layers:
        for name, entry in layer.items():
            is_of_profile = entry.origin.layer in (Layer.USER_PROFILE, Layer.PROJECT_PROFILE)
            if is_of_profile and name not in (_ENV.name, "hosts", *OF_JOBS, *OF_MACHINES):
                raw = entry.raw
                yield TABLE[name].variable, raw if isinstance(raw, str) else ",".join(raw)


def _reject_local_flags(parsed: Parsed, settings: Settings) -> None:
    """Raise if flags or settings apply to a single machine."""
    given = [name for name in _SET_BY_SLURM if settings.origin(name).is_for_this_launch]
    asked = {"--in-process": parsed.in_process, "--machine": parsed.machine is not None}
    flags = [flag for flag, is_given in asked.items() if is_given]
    if given or flags:
        raise ConfigError(
            f"{', '.join(given + flags)} cannot be set for a job: SLURM chooses its machines",
            where=settings.where(*given) if given else "the command line, with --submit",
            fix=f"remove {' and '.join(given + flags)}; "
            "set the number of machines with --num-machines N",
            code=Code.FLAGS_CONTRADICT,
        )


def _resolved(layers: Sequence[Entries], machine: Machine, environ: Mapping[str, str]) -> Settings:
    """Return the validated settings; detected values are those of this machine."""
    check_everywhere(layers, machine)
    settings = resolve(layers, machine, environ)
    if settings.hosts:
        raise ConfigError(
            "hosts and --submit cannot be used together: both select the machines",
            where=f"flag --submit; {settings.where('hosts')}",
            fix="remove --submit, or pass --hosts none",
            code=Code.FLAGS_CONTRADICT,
        )
    return settings


def _options(settings: Settings, name: str, folder: str) -> dict[str, str]:
    """Return the options for sbatch; the setting `sbatch` overrides all other settings."""
    own = settings.sbatch
    pattern = f"{folder.replace('%', '%%')}/{name}-{'%A_%a' if 'array' in own else '%j'}.log"
    options = {
        "job-name": name,
        "nodes": str(settings.num_machines),
        "ntasks-per-node": "1",
        "chdir": os.getcwd(),
        "output": pattern,
        "open-mode": "append",
        "requeue": "",
        **_stop_signal(settings, own),
    }
    if kind_of(settings.device).is_numbered and not any(key in own for key in _GPUS):
        options |= _gpus(settings)
    if settings.are_user_set("threads_per_process", "num_processes") and not (
        any(key in own for key in _CORES)
    ):
        options["cpus-per-task"] = str(settings.threads_per_process * settings.num_processes)
    if "no-requeue" in own:
        del options["requeue"]
    if "nodes" in own and settings.are_user_set("num_machines"):
        raise ConfigError(
            f"sbatch sets nodes={own['nodes']}, but num_machines is {settings.num_machines}",
            where=settings.where("sbatch", "num_machines"),
            fix="remove one of them",
            code=Code.FLAGS_CONTRADICT,
        )
    options |= own
    for key, value in options.items():
        _reject_unwritable(key, value)
    return options


def _stop_signal(settings: Settings, own: Mapping[str, str]) -> dict[str, str]:
    """Return the option that requests a stop signal; empty if the time limit is too short."""
    lead_s = settings.grace_period_s + _SAVING_S
    limit_s = _seconds_of(own.get("time", ""))
    if "signal" in own or limit_s > lead_s + _EARLIER_S + _START_S:
        return {"signal": f"TERM@{lead_s}"}
    log(
        f"note: the job will not be signaled to save before its time limit: {own['time']} is too "
        f"short for a signal {lead_s} s before the limit"
    )
    return {}


def _seconds_of(time: str) -> float:
    """Parse sbatch's time limit into seconds; infinity if unknown."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d?):(\d\d?)", time, re.ASCII)
    if match is None:  # SLURM's other forms, such as minutes
        return float("inf")
    days, hours, minutes, seconds = map(int, match.groups(default="0"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _gpus(settings: Settings) -> dict[str, str]:
    """Return the option for the number of GPUs per machine, if the user set this number."""
    count = settings.devices.size
    if settings.are_user_set("num_processes"):
        count = settings.num_processes
    return {} if count is None else {"gpus-per-node": str(count)}


def _reject_unwritable(key: str, value: str) -> None:
    """Raise if a batch script cannot contain `value`, or if SLURM would change it."""
    if not value.isprintable() or (key == "output" and "\\" in value):
        raise ConfigError(
            f"sbatch's option {key} would be {value!r}, which a batch script cannot contain",
            where="the flags, the profile and the working directory",
            fix="use a name without control characters or line breaks; a file name must not "
            "contain backslashes either",
            code=Code.JOB,
        )


def _inherited(parsed: Parsed, environ: Mapping[str, str], options: Mapping[str, str]) -> _JobEnv:
    """Return the job's environment; secrets are passed only through sbatch."""
    flagged = [word for word in parsed.env or () if masked_pairs([word]) != [word]]
    kept = environ.get(_ENV.variable, "")
    both = {**Settings.env.parser(kept), **Settings.env.parser(flagged)}
    with_secrets = {**environ, _ENV.variable: shlex.join(f"{k}={v}" for k, v in both.items())}
    held = environment_layer(environ).keys() - {*OF_MACHINES}
    names = [row.variable for row in TABLE.values() if row.name in held]
    names += [PROFILE_VARIABLE] * (PROFILE_VARIABLE in environ)
    secrets = [_ENV.variable] if flagged or masked_line(kept) != kept else []
    exported = options.get("export", environ.get("SBATCH_EXPORT", "ALL"))
    if secrets and "ALL" not in exported.split(","):
        raise ConfigError(
            f"{_ENV.variable} contains a secret, which the job must inherit from the environment, "
            "but sbatch is set not to export the environment",
            where=f"sbatch's `export` option, which is {exported!r}",
            fix="remove that option, or read the secret from a file in the script",
            code=Code.JOB,
        )
    return _JobEnv(
        written={name: environ[name] for name in names if name not in secrets},
        forwarded_env=_without_run_variables(with_secrets if flagged else environ),
        secrets=secrets,
    )


def _without_run_variables(environ: Mapping[str, str]) -> dict[str, str]:
    of_machines = [TABLE[name].variable for name in OF_MACHINES]
    is_in_job = "SLURM_JOB_ID" in environ
    stays = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {
        name: value
        for name, value in environ.items()
        if name not in (*RUN_VARIABLES, *of_machines)
        and not (is_in_job and name.startswith("SLURM_") and name not in stays)
    }


def _words(own: Sequence[str], program: Program) -> list[str]:
    """Return the arguments of `headway launch` in the job."""
    parts = [(word, *word.partition("=")[::2]) for word in own]
    public = [
        word for word, name, value in parts if name != _ENV.flag or masked_pairs([value]) == [value]
    ]
    return job_args(public, program, _HERE)


def _print_notes(
    options: Mapping[str, str], inherited: _JobEnv, program: Program, *, is_quiet: bool
) -> None:
    if inherited.secrets:
        log(
            f"note: the secrets in {', '.join(inherited.secrets)} are not in the batch script: the "
            "job inherits them from the environment of this command"
        )
    if masked_command(program.args) != list(program.args):
        log(
            "note: an argument that looks like a secret is in the batch script, which SLURM "
            "stores; pass it in an environment variable instead"
        )
    if not is_quiet and not any(key in options for key in (*_CORES, *_GPUS)):
        log("note: SLURM may allocate one core per machine; set --sbatch cpus-per-task=N")


def _make_folder(folder: str, settings: Settings) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return
        reason = "no permission"
    except OSError as error:
        reason = str(error.strerror)
    raise MachineError(
        f"the job's log folder is not writable: {reason}",
        where=shown(folder),
        fix=f"pass another folder: {TABLE['log_dir'].flag} DIR ({settings.where('log_dir')})",
        code=Code.UNWRITABLE,
    )
