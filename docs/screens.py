"""Run every `$ headway ...` command of the pages in docs/ and write its output into the page.

    python docs/screens.py     from the root of the repository

The commands run in a temporary folder with a `train.py` and the recorded machines of
tests/machines; names of this machine and its folders are replaced. A screen is not rewritten if it
has a line "...", or if its script is not in that folder and it does not show an error.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SCREEN = re.compile(r"```console\n\$ (headway .*)\n(?:[^`]|`(?!``))*```")
ELIDED = re.compile(r"^ *\.\.\.$", re.MULTILINE)
Execute = Callable[[list[str], dict[str, str], Path], str]
TIMEOUT_S = 500  # an estimate of several strategies, on a busy machine
WITH_ACCELERATE = """\
from accelerate import Accelerator
from accelerate.utils import BnbQuantizationConfig, set_seed

set_seed(1)
accelerator = Accelerator(mixed_precision="no")
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
accelerator.backward(loss)
"""


def make_stage(folder: Path) -> None:
    """Write the files that the commands of the pages need to `folder`."""
    (folder / "train.py").write_text("print('trained')\n")
    (folder / "train_with_accelerate.py").write_text(WITH_ACCELERATE)
    (folder / "examples").mkdir()
    for example in ("char_gpt.py", "fsdp.py"):
        shutil.copy(ROOT / "examples" / example, folder / "examples")
    for recorded in (ROOT / "tests" / "machines").glob("*.json"):
        shutil.copy(recorded, folder)


def execute(command: list[str], environ: dict[str, str], folder: Path) -> str:
    """Run a command and return its stdout and stderr as one text."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done.stdout


def run(command: str, stage: Path, execute: Execute = execute) -> str:
    """Run a command of a page and return its output without names of this machine."""
    environ = {
        **os.environ,
        "HOME": str(stage),
        "XDG_CONFIG_HOME": str(stage / ".config"),
        "PYTHONPATH": str(ROOT),
    }
    for name in [name for name in environ if name.startswith(("HEADWAY_", "ACCELERATE_"))]:
        del environ[name]
    output = execute([sys.executable, "-m", *shlex.split(command)], environ, stage)
    output = re.sub(r"headway: after \d+ s the script is at .*\n", "", output)  # a slow machine
    output = output.replace(sys.executable, "/home/me/.venv/bin/python")
    output = output.replace(str(stage), "/home/me/project").replace(tempfile.gettempdir(), "/tmp")
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "laptop", output)


def is_reproducible(screen: str, command: str, stage: Path) -> bool:
    """Return whether a screen is the whole output of its command and its script exists."""
    if ELIDED.search(screen):
        return False
    scripts = [word for word in shlex.split(command) if word.endswith(".py")]
    return "error:" in screen or all((stage / script).exists() for script in scripts)


def updated(text: str, stage: Path, run: Callable[[str, Path], str] = run) -> str:
    """Return the text of a page with the current output of its commands."""

    def screen_of(found: re.Match[str]) -> str:
        if not is_reproducible(found[0], found[1], stage):
            return found[0]
        return f"```console\n$ {found[1]}\n{run(found[1], stage)}```"

    return SCREEN.sub(screen_of, text)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        make_stage(stage)
        for page in PAGES:
            page.write_text(updated(page.read_text(), stage))


if __name__ == "__main__":
    main()
