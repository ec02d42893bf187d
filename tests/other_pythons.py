"""Runs the tests that need no torch under the other Pythons that are found on this machine.

    python tests/other_pythons.py [--whole]

The lowest version runs all of them, the highest those that start no process; `--whole` runs all
under all versions. Each gets a virtual environment of its own, `.venv-3.X`, with everything but
torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.12", "3.13")
LOWEST, HIGHEST = VERSIONS[0], VERSIONS[-1]
PACKAGES = ["pyyaml", "psutil", "questionary", "rich"]
PACKAGES += ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "pexpect", "pyte", "tqdm"]
TESTS = ["tests/architecture", "tests/ipc", "tests/machine", "tests/settings"]
TESTS += ["tests/launcher", "tests/commands", "tests/config_wizard", "tests/checkpoint"]


def find_python(version: str) -> str | None:
    """Return a working interpreter of this version: on the PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        check = [str(candidate), "-c", "import venv, sys; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(check, capture_output=True, text=True)
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return str(candidate)
    return None


def run_tests(python: str, version: str, *, whole: bool) -> int:
    """Make the environment where there is none, run the tests in it, return pytest's exit code."""
    environment = ROOT / f".venv-{version}"
    own = str(environment / "bin" / "python")
    ready = environment / ".ready"  # holds what is installed
    if not ready.exists() or ready.read_text() != " ".join(PACKAGES):
        subprocess.run([python, "-m", "venv", "--clear", str(environment)], check=True)
        subprocess.run([own, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        ready.write_text(" ".join(PACKAGES))
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles all of Headway anew
    command = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", "2", *TESTS]
    command += [] if whole else ["--quick"]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode


def main() -> int:
    failed = []
    all_whole = "--whole" in sys.argv
    for version in VERSIONS if all_whole else (LOWEST, HIGHEST):
        python = find_python(version)
        if version == f"{sys.version_info[0]}.{sys.version_info[1]}" or python is None:
            print(f"Python {version}: {'this one' if python else 'not found'}, skipped")
            continue
        print(f"Python {version}:", flush=True)
        if run_tests(python, version, whole=all_whole or version == LOWEST):
            failed.append(version)
    if failed:
        print(f"failed under Python {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
