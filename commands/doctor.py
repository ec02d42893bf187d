"""`headway doctor`: what is wrong with this machine, each finding with its fix."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from headway.commands.flags import Parser, look_at_machine
from headway.commands.tables import print_table
from headway.errors import HeadwayError
from headway.machine.apple import how_to_renew_torch
from headway.machine.facts import Machine
from headway.machine.host import without_home
from headway.machine.snapshot import as_data
from headway.settings.diagnosis import ERROR, OK, SKIPPED, TEMPORARY_FIX, WARNING, Finding, diagnose
from headway.settings.layers import environment_layer, profile_layers
from headway.settings.resolve import resolve
from headway.settings.table import Settings

LIVE = ("torch runs", "profile", "hostname", "port", "disk")
TORCH_TIMEOUT_S = 120
LEAST_FREE_BYTES = {WARNING: 5 * 2**30, ERROR: 2**28}
CONNECT_TIMEOUT_S = 3.0

ASK_TORCH = """\
import json, torch
cuda = {"count": torch.cuda.device_count()}
if cuda["count"]:
    try:
        torch.zeros(1, device="cuda")
    except Exception as error:
        cuda["error"] = str(error).splitlines()[0]
print(json.dumps({
    "version": torch.__version__, "cuda": cuda,
    "mps_built": torch.backends.mps.is_built(), "mps": torch.backends.mps.is_available(),
}))
"""


def main(argv: Sequence[str]) -> int:
    """Run `headway doctor` with these words; 1 when there is an error."""
    parser = Parser("doctor", "Say what is wrong with this machine, and how to mend it.")
    parser.flag("--json", help="as one JSON object: {machine, checks}")
    parser.machine_flag()
    parsed = parser.parse_flags(argv)
    machine, _ = look_at_machine(parsed, os.environ, full=True)
    if parsed.machine is None:
        live = list(_look_closer(machine))
    else:
        live = [Finding(name, SKIPPED, "it needs the machine itself") for name in LIVE]
    findings = [
        one._replace(what=without_home(one.what, os.environ)) for one in (*diagnose(machine), *live)
    ]
    if parsed.json:
        checks = [finding._asdict() for finding in findings]
        print(json.dumps({"machine": as_data(machine), "checks": checks}, indent=2))
    else:
        rows = [(one.status, one.check, _with_fix(one)) for one in findings]
        print_table(("", "check", "finding"), rows)
    return int(any(finding.status == ERROR for finding in findings))


def _with_fix(finding: Finding) -> str:
    return f"{finding.what}\nfix: {finding.fix}" if finding.fix else finding.what


def _look_closer(machine: Machine) -> Iterator[Finding]:
    """Yield what no snapshot can tell."""
    yield _ask_torch(machine)
    try:
        settings = resolve([*profile_layers(), environment_layer()], machine)
    except HeadwayError as error:
        settings = resolve([], machine)
        for problem in error.problems:
            yield Finding("profile", ERROR, f"{problem.what} ({problem.where})", problem.fix)
    else:
        yield from _check_profile(settings, machine)
    yield _check_hostname()
    yield _check_port(settings)
    yield from _check_disk()


def _ask_torch(machine: Machine) -> Finding:
    """Ask a Python of its own what only a running torch knows."""
    try:
        os.getcwd()
    except OSError:  # the disk's finding says why
        return Finding(LIVE[0], SKIPPED, "torch cannot be imported without a working folder")
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TORCH_TIMEOUT_S,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        what = f"importing torch takes more than {TORCH_TIMEOUT_S} s"
        return Finding(LIVE[0], ERROR, what, "look for a slow or overloaded disk")
    except OSError as error:
        what = f"no other Python can be started here: {error.strerror}"
        return Finding(LIVE[0], ERROR, what, "`ulimit -n 65536; ulimit -u 65536`")
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding(LIVE[0], ERROR, f"torch cannot be imported: {said}", "reinstall torch")
    visible = machine.visible_gpus
    expected = 1 if any(gpu.slice_of for gpu in visible) else len(visible)
    cuda = answer["cuda"]
    if "error" in cuda:
        what = f"torch sees {cuda['count']} GPUs, and fails on the first: {cuda['error']}"
        return Finding(LIVE[0], ERROR, what, "`nvidia-smi` shows who uses it, and its compute mode")
    if cuda["count"] < expected:
        what = f"torch sees {cuda['count']} of {expected} GPUs"
        return Finding(LIVE[0], ERROR, what, "reinstall the NVIDIA driver, or reboot")
    if machine.mps and not answer["mps"]:
        built = "" if answer["mps_built"] else ": it is built without MPS"
        what = f"torch cannot use this Mac's GPU{built}"
        return Finding(LIVE[0], ERROR, what, how_to_renew_torch(machine.macos))
    return Finding(LIVE[0], OK, f"torch {answer['version']} was imported by {sys.executable}")


def _check_profile(settings: Settings, machine: Machine) -> Iterator[Finding]:
    from headway.launcher.planning.checks import contradictions, impossible_here
    from headway.launcher.planning.supervision import contradictions_of_ranks

    problems = [*contradictions(settings), *contradictions_of_ranks(settings)]
    problems += impossible_here(settings, machine)
    for problem in problems:
        fix = f"{problem.fix}; or `headway launch --fit`"
        yield Finding("profile", ERROR, f"{problem.what} ({problem.where})", fix)
    if not problems:
        yield Finding("profile", OK, "profiles and HEADWAY_* variables can be obeyed here")


def _check_hostname() -> Finding:
    """See whether this machine's name leads back to it; gloo listens where the name leads."""
    name = socket.gethostname()
    fix = f"add `127.0.0.1 {name}` to /etc/hosts; `headway launch` on one machine needs no name"
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        what = f"this machine's name {name!r} leads nowhere: {error.strerror}"
        return Finding("hostname", WARNING, what, fix)
    except UnicodeError:  # DNS allows 63 characters between dots, Linux 64; torch asks for it, too
        what = f"this machine's name {name!r} is too long: torch cannot start several ranks with it"
        return Finding("hostname", ERROR, what, "`sudo hostname` with at most 63 characters")
    try:
        with socket.socket(address[0], socket.SOCK_STREAM) as probe:
            probe.bind((address[4][0], 0))
    except OSError as error:
        what = f"{name!r} leads to {address[4][0]}, where nothing can listen: {error.strerror}"
        return Finding("hostname", WARNING, what, fix)
    return Finding("hostname", OK, f"{name} is {address[4][0]}")


def _check_port(settings: Settings) -> Finding:
    """See whether the ranks of several machines could meet; one machine chooses a free port."""
    port = settings.main_port or 29500
    address = settings.main_address
    if settings.num_machines > 1 and settings.machine_rank > 0 and address is not None:
        return _check_reachable(address, port)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        what = f"port {port} cannot be had: {error.strerror}"
        return Finding("port", WARNING, what, "choose another one with --main-port")
    return Finding("port", OK, f"{port} is free for runs on several machines")


def _check_reachable(address: str, port: int) -> Finding:
    try:
        socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        pass  # the machine is there; nobody has launched on it yet
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have such a name
        reason = error.strerror if isinstance(error, OSError) else None
        what = f"machine 0 is not reached at {address}:{port}: {reason or error}"
        return Finding("port", ERROR, what, "check main_address, and the firewalls between them")
    return Finding("port", OK, f"machine 0 is reached at {address}")


def _check_disk() -> Iterator[Finding]:
    free_in: dict[str, int] = {}
    for name, find, fix in (
        ("the working folder", os.getcwd, "`cd` into a folder that is there"),
        ("a folder for temporary files", tempfile.gettempdir, TEMPORARY_FIX),
    ):
        try:
            folder = find()
            free_in[folder] = shutil.disk_usage(folder).free
        except OSError as error:
            yield Finding("disk", ERROR, f"{name} cannot be had: {error.strerror}", fix)
    for folder, free in free_in.items():
        what = f"{free / 2**30:.1f} GiB are free in {folder}"
        low = [status for status, least in LEAST_FREE_BYTES.items() if free < least]
        fix = "remove old checkpoints and logs, or write elsewhere" if low else ""
        yield Finding("disk", low[-1] if low else OK, what, fix)
