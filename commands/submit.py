"""`headway launch --submit slurm`: the same launch, as a job of SLURM."""

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

from headway.commands.elsewhere import Moved, RemoteJob, check_everywhere, moved, remote_args
from headway.commands.flags import Parsed
from headway.devices.table import kind_of
from headway.errors import ConfigError, HeadwayError, MachineError
from headway.history.store import COPIED_FROM, Commit, git, read_commit, script_path
from headway.ipc.origin import Layer
from headway.ipc.run_contract import CODE_VARIABLE
from headway.ipc.secrets import masked_command, masked_line, masked_pairs
from headway.ipc.stderr import log
from headway.ipc.typed import plain
from headway.launcher.plan.program import Program, interpreter
from headway.launcher.remote.orders import OF_ONE_RUN
from headway.launcher.remote.slurm_jobs import SlurmJob, batch_script, sbatch_words
from headway.launcher.remote.slurm_jobs import submit as sbatch
from headway.machine.facts import Machine
from headway.settings.layers import environment_layer
from headway.settings.profile import Entries
from headway.settings.profile_files import VARIABLE as PROFILE_VARIABLE
from headway.settings.profile_files import shown
from headway.settings.resolve import resolve
from headway.settings.table import OF_JOBS, OF_MACHINES, OFF, TABLE, Settings

_MAX_BYTES = 50 * 2**20  # of the code that a job runs a copy of
_FOLDER = "headway-jobs"  # of scripts and logs, unless log_dir is set
_SAID_BY_SLURM = OF_MACHINES[1:]
_SAVING_S = 90  # before the time limit, beside the grace period
_EARLIER_S = 60  # SLURM's signals come as much before their time
_START_S = 60  # of a job, before it has anything to save
_HERE = {"--submit", "--dry-run", "--show-secrets", *OF_JOBS, "num_machines"}
"""Flags and settings for here, which the launch in the job does not get."""

_ENV = TABLE["env"]
_GPUS = ("gres", "gpus", "gpus-per-node", "gpus-per-task")
_CORES = ("cpus-per-task", "cpus-per-gpu", "exclusive")


class _Inherited(NamedTuple):
    written: Mapping[str, str]  # that the script sets
    forwarded_env: Mapping[str, str]  # sbatch's own, with the secrets that no script may hold
    secrets: Sequence[str]  # the names of the variables with them


def submit(request: RemoteJob) -> int:
    """Submit the launch, and return the exit code.

    Raises ConfigError for an error that every machine would report, LaunchError if SLURM refuses.
    """
    parsed, own, program, layers, machine, environ = request
    settings = _checked(layers, machine, environ)
    _refuse_elsewhere(parsed, settings)
    name = re.sub(r"[^\w.-]", "_", os.path.splitext(os.path.basename(program.name))[0])
    folder = os.path.abspath(settings.log_dir or _FOLDER)
    options = _options(settings, name, folder)
    inherited = _inherited(parsed, environ, options)
    into = os.path.join(folder, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    frozen = _frozen(request, settings, into, inherited.written)
    program, written = frozen.program, {**inherited.written, **frozen.variables}
    words = _words(own, program)
    if parsed.dry_run and not parsed.show_secrets:
        words = masked_command(words)
    command = [*interpreter(), "-m", "headway", "launch", *words]
    script = batch_script(SlurmJob(options, written, command))
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
    print(job)
    log(f"submitted; `headway logs --follow {job}` shows its output, `scancel {job}` ends it")
    return 0


def _frozen(request: RemoteJob, settings: Settings, into: str, written: Mapping[str, str]) -> Moved:
    """Return the program in a copy of its code in `into`, with the current values of profiles."""
    program, folder = request.program, os.getcwd()
    if settings.snapshot == OFF:
        return Moved(program, {})
    script = script_path(program.kind, program.name)
    commit = read_commit(os.path.dirname(script) or folder)
    if commit is None:
        _note(
            request, "the script is in no commit of git: the job runs what is there when it starts"
        )
        return Moved(program, {})
    name = os.path.relpath(os.path.realpath(script), commit.root)
    if script and name not in _files_of(commit.root):
        _note(request, "git does not know the script: the job runs what is there when it starts")
        return Moved(program, {})
    if request.parsed.dry_run:
        _note(request, "the job will run a copy of the code, taken when it is submitted")
        return Moved(program, {})
    code = _copy(commit, os.path.dirname(into), into)
    said = {variable: text for variable, text in _of_profiles(request) if variable not in written}
    frozen = moved(program, folder, commit.root, code)
    in_place = "--set snapshot=off: in place"
    _note(
        request,
        f"the job runs the code as it is now, and reads other files when it runs: "
        f"{shown(code)} ({in_place})",
    )
    return frozen._replace(variables={**said, **frozen.variables, CODE_VARIABLE: code})


def _copy(commit: Commit, without: str, into: str) -> str:
    """Copy the code of a repository into a new folder, and return its path there.

    The folder `without` is skipped, even if git does not ignore it. Raises ConfigError if the code
    is too large.
    """
    root = commit.root
    reread = os.path.relpath(without, root) + os.sep
    sizes = {
        name: os.lstat(os.path.join(root, name)).st_size
        for name in _files_of(root)
        if not name.startswith(reread)
    }
    if (total := sum(sizes.values())) > _MAX_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise ConfigError(
            f"the code of the job would be {total >> 20} MiB in {len(sizes)} files; a snapshot "
            f"takes {_MAX_BYTES >> 20}. The largest: {largest} ({sizes[largest] / 2**20:.1f} MiB)",
            where=root,
            fix="name what is no code in .gitignore, or run what is there when the job starts: "
            "--set snapshot=off",
        )
    code = os.path.join(into, "code")
    try:
        os.makedirs(code)
        for name in sizes:
            target = os.path.join(code, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with suppress(FileNotFoundError):  # it has just been removed
                shutil.copy2(os.path.join(root, name), target, follow_symlinks=False)
        with open(os.path.join(into, COPIED_FROM), "w", encoding="utf-8") as file:
            json.dump(plain(commit), file)
    except OSError as error:
        shutil.rmtree(into, ignore_errors=True)
        raise MachineError(
            f"the code could not be copied for the job: {error.strerror}",
            where=error.filename or into,
            fix="free some space, or submit with --set snapshot=off",
        ) from None
    return code


def _files_of(root: str) -> list[str]:
    """Return the files that git tracks or does not ignore, and those tracked in submodules."""
    words = ("ls-files", "-z")
    tracked = git(root, *words, "--recurse-submodules") or ""
    others = git(root, *words, "--others", "--exclude-standard") or ""
    names = dict.fromkeys((tracked + others).split("\0")[:-1])
    paths = {name: os.path.join(root, name) for name in names}
    return [name for name, at in paths.items() if os.path.islink(at) or os.path.isfile(at)]


def _note(request: RemoteJob, text: str) -> None:
    if not request.parsed.quiet:
        log(f"note: {text}")


def _of_profiles(request: RemoteJob) -> Iterator[tuple[str, str]]:
    """Yield the variables for the current values of profiles, except `env`: it may hold secrets."""
    for layer in request.layers:
        for name, entry in layer.items():
            is_of_profile = entry.origin.layer in (Layer.USER_PROFILE, Layer.PROJECT_PROFILE)
            if is_of_profile and name not in (_ENV.name, "hosts", *OF_JOBS, *OF_MACHINES):
                raw = entry.raw
                yield TABLE[name].variable, raw if isinstance(raw, str) else ",".join(raw)


def _refuse_elsewhere(parsed: Parsed, settings: Settings) -> None:
    """Refuse flags and settings for this machine, or for one launch of several."""
    given = [name for name in _SAID_BY_SLURM if settings.origin(name).is_for_this_launch]
    asked = {"--in-process": parsed.in_process, "--machine": parsed.machine is not None}
    flags = [flag for flag, is_given in asked.items() if is_given]
    if given or flags:
        raise ConfigError(
            f"{', '.join(given + flags)} cannot be set for a job: SLURM chooses its machines",
            where=settings.where(*given) if given else "the command line, beside --submit",
            fix=f"leave {' and '.join(given + flags)} out; --num-machines N says how many machines",
        )


def _checked(layers: Sequence[Entries], machine: Machine, environ: Mapping[str, str]) -> Settings:
    """Return the settings; detected values are those of this machine."""
    check_everywhere(layers, machine)
    settings = resolve(layers, machine, environ)
    if settings.hosts:
        raise ConfigError(
            "hosts says on which machines to run, and so does --submit",
            where=f"flag --submit; {settings.where('hosts')}",
            fix="leave --submit out, or pass --hosts none",
        )
    return settings


def _options(settings: Settings, name: str, folder: str) -> dict[str, str]:
    """Return the options of sbatch: those of the setting replace ours."""
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
            f"sbatch has nodes={own['nodes']}, and num_machines is {settings.num_machines}",
            where=settings.where("sbatch", "num_machines"),
            fix="keep one of the two",
        )
    options |= own
    for key, value in options.items():
        _refuse_unwritable(key, value)
    return options


def _stop_signal(settings: Settings, own: Mapping[str, str]) -> dict[str, str]:
    """Return the option for a signal before the time limit, unless it would come at the start."""
    lead_s = settings.grace_period_s + _SAVING_S
    limit_s = _seconds_of(own.get("time", ""))
    if "signal" in own or limit_s > lead_s + _EARLIER_S + _START_S:
        return {"signal": f"TERM@{lead_s}"}
    log(
        f"note: the job gets no signal to save before its time limit: {own['time']} is too short "
        f"for one {lead_s} s ahead"
    )
    return {}


def _seconds_of(time: str) -> float:
    """Return sbatch's option time in seconds; infinity if unknown."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d?):(\d\d?)", time, re.ASCII)
    if match is None:  # SLURM's other forms, such as minutes
        return float("inf")
    days, hours, minutes, seconds = map(int, match.groups(default="0"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _gpus(settings: Settings) -> dict[str, str]:
    """Return the option for the GPUs per machine that the user has set."""
    count = settings.devices.size
    if settings.are_user_set("num_processes"):
        count = settings.num_processes
    return {} if count is None else {"gpus-per-node": str(count)}


def _refuse_unwritable(key: str, value: str) -> None:
    """Refuse what a line of a batch script cannot hold, and file names that SLURM would change."""
    if not value.isprintable() or (key == "output" and "\\" in value):
        raise ConfigError(
            f"sbatch's option {key} would be {value!r}, which a batch script cannot hold",
            where="the flags, the profile and the working directory",
            fix="use a name without line breaks, control characters and, for files, backslashes",
        )


def _inherited(
    parsed: Parsed, environ: Mapping[str, str], options: Mapping[str, str]
) -> _Inherited:
    """Return the job's environment; a secret reaches it through sbatch alone."""
    flagged = [word for word in parsed.env or () if masked_pairs([word]) != [word]]
    kept = environ.get(_ENV.variable, "")
    both = {**Settings.env.kind(kept), **Settings.env.kind(flagged)}
    with_secrets = {**environ, _ENV.variable: shlex.join(f"{k}={v}" for k, v in both.items())}
    held = environment_layer(environ).keys() - {*OF_MACHINES}
    names = [row.variable for row in TABLE.values() if row.name in held]
    names += [PROFILE_VARIABLE] * (PROFILE_VARIABLE in environ)
    secrets = [_ENV.variable] if flagged or masked_line(kept) != kept else []
    exported = options.get("export", environ.get("SBATCH_EXPORT", "ALL"))
    if secrets and "ALL" not in exported.split(","):
        raise ConfigError(
            f"{_ENV.variable} holds a secret, which no batch script may hold, and sbatch is not to "
            "hand the environment on",
            where=f"sbatch's option export, which is {exported!r}",
            fix="leave that option out, or let the script read the secret from a file",
        )
    return _Inherited(
        written={name: environ[name] for name in names if name not in secrets},
        forwarded_env=_of_no_other_run(with_secrets if flagged else environ),
        secrets=secrets,
    )


def _of_no_other_run(environ: Mapping[str, str]) -> dict[str, str]:
    of_machines = [TABLE[name].variable for name in OF_MACHINES]
    is_in_job = "SLURM_JOB_ID" in environ
    stays = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {
        name: value
        for name, value in environ.items()
        if name not in (*OF_ONE_RUN, *of_machines)
        and not (is_in_job and name.startswith("SLURM_") and name not in stays)
    }


def _words(own: Sequence[str], program: Program) -> list[str]:
    """Return the words after `headway launch` in the job."""
    parts = [(word, *word.partition("=")[::2]) for word in own]
    public = [
        word for word, name, value in parts if name != _ENV.flag or masked_pairs([value]) == [value]
    ]
    return remote_args(public, program, _HERE)


def _print_notes(
    options: Mapping[str, str], inherited: _Inherited, program: Program, *, is_quiet: bool
) -> None:
    if inherited.secrets:
        log(
            f"note: {', '.join(inherited.secrets)} holds a secret and is not in the script: the "
            "job inherits it from the environment of this command"
        )
    if masked_command(program.args) != list(program.args):
        log(
            "note: an argument of the script looks like a secret, and the batch script holds it, "
            "which SLURM keeps; a variable of the environment would not be in it"
        )
    if not is_quiet and not any(key in options for key in (*_CORES, *_GPUS)):
        log("note: SLURM may give one core on each machine: --sbatch cpus-per-task=N asks for more")


def _make_folder(folder: str, settings: Settings) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return
        reason = "no permission"
    except OSError as error:
        reason = str(error.strerror)
    raise MachineError(
        f"the folder of the job's log cannot be written to: {reason}",
        where=shown(folder),
        fix=f"name another: {TABLE['log_dir'].flag} DIR ({settings.where('log_dir')})",
    )
