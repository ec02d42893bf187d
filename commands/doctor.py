"""`headway doctor`: check this machine; each problem has a fix."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from headway.commands.flags import Parser, machine_from_flags
from headway.commands.tables import print_table
from headway.devices.table import kind_of
from headway.errors import Do, HeadwayError, Problem, Remedy, advice, run
from headway.launcher.clusters.cluster import cluster_layer
from headway.machine.apple import how_to_update_torch
from headway.machine.facts import Machine
from headway.machine.host import without_home
from headway.machine.snapshot import as_data
from headway.settings.layers import launch_layers, profile_layers
from headway.settings.machine_problems import (
    ERROR,
    OK,
    SKIPPED,
    TEMPORARY_FIX,
    WARNING,
    Check,
    machine_problems,
)
from headway.settings.problems import problems
from headway.settings.resolve import resolve
from headway.settings.table import Settings

LIVE = ("torch runs", "profile", "hostname", "port", "disk")
TORCH_TIMEOUT_S = 120
LEAST_FREE_BYTES = {WARNING: 5 * 2**30, ERROR: 2**28}
CONNECT_TIMEOUT_S = 3.0

ASK_TORCH = """\
import json, sys, torch
kind = sys.argv[1]
gpus = {"count": getattr(torch, kind).device_count()}
if gpus["count"]:
    try:
        torch.zeros(1, device=kind)
    except Exception as error:
        gpus["error"] = str(error).splitlines()[0]
print(json.dumps({
    "version": torch.__version__, "gpus": gpus,
    "mps_built": torch.backends.mps.is_built(), "mps": torch.backends.mps.is_available(),
}))
"""


def main(argv: Sequence[str]) -> int:
    """Run `headway doctor` with these words; return 1 if a check failed."""
    parser = Parser("doctor", "Check this machine, and print how to fix each problem.")
    parser.flag("--json", help="print one JSON object: {machine, checks}")
    parser.machine_flag()
    parsed = parser.parse_flags(argv)
    machine, _ = machine_from_flags(parsed, os.environ, full=True)
    if parsed.machine is None:
        live = list(_live_checks(machine))
    else:
        live = [Check(name, SKIPPED, "not possible for a recorded machine") for name in LIVE]
    found = [*machine_problems(machine), *live]
    if parsed.machine is None:
        found = with_own_pip(found, torch_outside(_torch_folder()))
    checks = [one._replace(what=without_home(one.what, os.environ)) for one in found]
    if parsed.json:
        data = {"machine": as_data(machine), "checks": [check.as_data() for check in checks]}
        print(json.dumps(data, indent=2))
    else:
        rows = [(one.status.value, one.check, _with_fix(one)) for one in checks]
        print_table(("", "check", "finding"), rows)
    return int(any(check.status is ERROR for check in checks))


def _with_fix(check: Check) -> str:
    return f"{check.what}\nfix: {check.fix}" if check.fix else check.what


def _live_checks(machine: Machine) -> Iterator[Check]:
    """Yield the checks that need the machine itself."""
    yield _ask_torch(machine)
    try:
        layers = launch_layers(profile_layers(), os.environ)
        settings = resolve(layers, machine, cluster=cluster_layer(os.environ, layers))
    except HeadwayError as error:
        settings = resolve([], machine)
        for problem in error.problems:
            yield Check("profile", ERROR, f"{problem.what} ({problem.where})", _remedies(problem))
    else:
        yield from _check_profile(settings, machine)
    yield _check_hostname()
    yield _check_port(settings)
    yield from _check_disk()


def _torch_folder() -> str:
    """Return the folder of the torch that scripts import, without importing it; empty if none."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    return next(iter(spec.submodule_search_locations or ()), "") if spec else ""


def torch_outside(folder: str) -> Remedy | None:
    """Return how to leave out the torch in `folder` if it is another environment's, or None.

    pip installs into this environment, which such a torch comes before.
    """
    import site

    def is_below(parent: str) -> bool:
        return bool(parent) and os.path.realpath(folder).startswith(
            os.path.join(os.path.realpath(parent), "")
        )

    if not folder or is_below(sys.prefix):
        return None
    if any(map(is_below, os.environ.get("PYTHONPATH", "").split(os.pathsep))):
        return run("unset PYTHONPATH")
    if is_below(site.getusersitepackages()):
        return run("export PYTHONNOUSERSITE=1")
    return None


def with_own_pip(checks: Sequence[Check], leave_out: Remedy | None) -> list[Check]:
    """Return the checks with every `pip` that of this Python, whichever is first on the PATH.

    Args:
        checks: of this machine.
        leave_out: what to do first, where another environment's torch is the one in use.
    """
    python = shlex.quote(sys.executable)

    def own(remedy: Remedy) -> Remedy:
        if not any(step.do is Do.RUN and step.what.startswith("pip ") for step in remedy):
            return remedy
        steps = [
            step._replace(what=f"{python} -m {step.what}") if step.what.startswith("pip ") else step
            for step in remedy
        ]
        return (*(leave_out or ()), *steps)

    return [one._replace(remedies=[own(remedy) for remedy in one.remedies]) for one in checks]


def _ask_torch(machine: Machine) -> Check:
    """Import torch in another Python, and compare what it finds."""
    try:
        os.getcwd()
    except OSError:  # the disk check reports why
        return Check(LIVE[0], SKIPPED, "not possible without a working folder")
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH, machine.gpu_kind],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TORCH_TIMEOUT_S,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        what = f"importing torch takes more than {TORCH_TIMEOUT_S} s"
        fix = advice("check whether the disk is slow or overloaded")
        return Check(LIVE[0], ERROR, what, [fix])
    except OSError as error:
        what = f"cannot start another Python: {error.strerror}"
        return Check(LIVE[0], ERROR, what, [run("ulimit -n 65536; ulimit -u 65536")])
    except (IndexError, ValueError):
        message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        what = f"cannot import torch: {message}"
        return Check(LIVE[0], ERROR, what, [run("pip install --force-reinstall torch")])
    visible = machine.visible_gpus
    expected = 1 if any(gpu.slice_of for gpu in visible) else len(visible)
    gpus = answer["gpus"]
    if "error" in gpus:
        what = f"torch sees {gpus['count']} GPUs, but the first fails: {gpus['error']}"
        tool = kind_of(machine.gpu_kind).tool
        fix = advice(f"run `{tool}` to see its processes and compute mode")
        return Check(LIVE[0], ERROR, what, [fix])
    if gpus["count"] < expected:
        what = f"torch sees {gpus['count']} of {expected} GPUs"
        return Check(LIVE[0], ERROR, what, [advice("reboot"), advice("reinstall the driver")])
    if machine.mps and not answer["mps"]:
        built = "" if answer["mps_built"] else ": it is built without MPS"
        what = f"torch cannot use MPS on this Mac{built}"
        return Check(LIVE[0], ERROR, what, [how_to_update_torch(machine.macos)])
    return Check(LIVE[0], OK, f"torch {answer['version']} was imported by {sys.executable}")


def _check_profile(settings: Settings, machine: Machine) -> Iterator[Check]:
    found = problems(settings, machine)
    for problem in found:
        fit = advice("`headway launch --fit`")
        what = f"{problem.what} ({problem.where})"
        yield Check("profile", ERROR, what, [*_remedies(problem), fit])
    if not found:
        yield Check("profile", OK, "profiles and HEADWAY_* variables are valid on this machine")


def _remedies(problem: Problem) -> Sequence[Remedy]:
    return [advice(problem.fix)]  # it says where each setting was set


def _check_hostname() -> Check:
    """Check that the hostname resolves to an address of this machine, as gloo listens on it."""
    name = socket.gethostname()
    fix = [
        advice(
            f"have `127.0.0.1 {name}` added to /etc/hosts; not needed for launches on one machine"
        )
    ]
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        what = f"hostname {name!r} does not resolve: {error.strerror}"
        return Check("hostname", WARNING, what, fix)
    except UnicodeError:  # DNS allows 63 characters between dots, Linux 64; torch resolves the name
        what = f"hostname {name!r} is too long for DNS: torch cannot start several ranks"
        shorter = advice("have this machine named by at most 63 characters")
        return Check("hostname", ERROR, what, [shorter])
    try:
        with socket.socket(address[0], socket.SOCK_STREAM) as probe:
            probe.bind((address[4][0], 0))
    except OSError as error:
        what = f"{name!r} resolves to {address[4][0]}, not bindable here: {error.strerror}"
        return Check("hostname", WARNING, what, fix)
    return Check("hostname", OK, f"{name} is {address[4][0]}")


def _check_port(settings: Settings) -> Check:
    """Check the port for runs on several machines; a run on one machine takes a free one."""
    port = settings.main_port or 29500
    address = settings.main_address
    if settings.num_machines > 1 and settings.machine_rank and address is not None:
        return _check_reachable(address, port)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        what = f"port {port} cannot be bound: {error.strerror}"
        return Check("port", WARNING, what, [advice("choose another port with --main-port")])
    return Check("port", OK, f"{port} is free for runs on several machines")


def _check_reachable(address: str, port: int) -> Check:
    try:
        socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        pass  # the machine is reachable, but has no launch yet
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        reason = error.strerror if isinstance(error, OSError) else None
        what = f"machine 0 cannot be reached at {address}:{port}: {reason or error}"
        fix = advice("check main_address and the firewalls between the machines")
        return Check("port", ERROR, what, [fix])
    return Check("port", OK, f"machine 0 can be reached at {address}")


def _check_disk() -> Iterator[Check]:
    free_in: dict[str, int] = {}
    for name, find, fix in (
        ("the working folder", os.getcwd, "`cd` to a folder that exists"),
        ("a folder for temporary files", tempfile.gettempdir, TEMPORARY_FIX),
    ):
        try:
            folder = find()
            free_in[folder] = shutil.disk_usage(folder).free
        except OSError as error:
            yield Check("disk", ERROR, f"{name} is not available: {error.strerror}", [advice(fix)])
    for folder, free in free_in.items():
        what = f"{free / 2**30:.1f} GiB free in {folder}"
        low = [status for status, least in LEAST_FREE_BYTES.items() if free < least]
        space = advice("remove old checkpoints and logs, or write to another disk")
        yield Check("disk", low[-1] if low else OK, what, [space] if low else ())
