"""The page of error messages: the rows of headway/errors.md, with the output of their examples.

The commands run in this process, for recorded machines, in a temporary folder.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from docs.screens import make_stage
from headway.commands.explain import Page, read_pages
from headway.commands.main import main as headway
from headway.errors import (
    CheckpointError,
    Code,
    ConfigError,
    HeadwayError,
    LaunchError,
    MachineError,
    UsageError,
)

MACHINES = {
    Code.DEVICES_OR_PROCESSES: "gpu_4",
    Code.SEVERAL_ON_MPS: "mac_m2",
    Code.NO_MPS: "mac_rosetta",
    Code.NO_GPU: "driver_too_old",
    Code.NO_SUCH_GPU: "gpu_4",
    Code.SEVERAL_MIG_SLICES: "gpu_mig",
    Code.TOO_FEW_GPUS: "gpu_2_one_busy",
    Code.NO_BF16: "gpu_mixed",
}
"""The recorded machines on which examples fail; others fail on laptop_cpu."""

HEADINGS = {
    "HW001": "Profiles, variables and flags",
    "HW101": "Settings that contradict each other",
    "HW201": "This machine",
    "HW301": "Launches, runs and jobs",
    "HW401": "Checkpoints",
    "HW501": "Calls of a script",
    "HW601": "Data",
}
"""The headings of the page, by the first error below each."""

INTRODUCTION = """\
# Error messages

The first line of an error ends with its id. `headway explain ID` prints the cause, an example and
the fix, as on this page, and `headway explain` lists all ids. An id keeps its meaning in later
versions.

| kind | meaning | exit code |
|---|---|---|
"""


def command_of(page: Page) -> str:
    """Return the example if it is a command to run, `headway launch train.py` for a profile."""
    found = re.fullmatch(r"`(headway [^`]+)`", page.example)
    if found is not None:
        return found[1]
    return "headway launch train.py" if profile_of(page) else ""


def profile_of(page: Page) -> str:
    """Return the text of headway.yaml if the example is a profile."""
    text, _, place = page.example.rpartition(" in ")
    lines = re.findall("`(.+?)`", text) if place == "headway.yaml" else []
    return "".join(f"{line}\n" for line in lines)


@contextmanager
def stage() -> Iterator[None]:
    """Change to a folder that has only the recorded machines, without HEADWAY_* variables."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(("HEADWAY_", "PET_"))]:
            del os.environ[name]
        os.environ |= {"HOME": folder, "XDG_CONFIG_HOME": str(Path(folder, ".config"))}
        make_stage(Path(folder))
        try:
            os.chdir(folder)
            yield
        finally:
            os.chdir(here)


def printed_by(page: Page) -> tuple[str, str]:
    """Return the command of a page's example and what it prints; call this within `stage`."""
    words = shlex.split(command_of(page))[1:]
    if words[0] == "launch":
        words[1:1] = ["--dry-run", "--machine", f"{MACHINES.get(page.id, 'laptop_cpu')}.json"]
    profile = Path("headway.yaml")
    if text := profile_of(page):
        profile.write_text(text)
    try:
        with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
            headway(words)
    finally:
        profile.unlink(missing_ok=True)
    return shlex.join(["headway", *words]), printed.getvalue()


def page() -> str:
    """Return the page as Markdown."""
    kinds: Sequence[type[HeadwayError]] = (
        ConfigError,
        UsageError,
        MachineError,
        LaunchError,
        CheckpointError,
    )
    rows = [f"| `{kind.__name__}` | {_first_line(kind)} | {kind.exit_code} |" for kind in kinds]
    with stage():
        return "\n".join([INTRODUCTION + "\n".join(rows), *map(_shown, read_pages().values())])


def _first_line(kind: type[HeadwayError]) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0]


def _shown(page: Page) -> str:
    lines = [f"\n## {HEADINGS[page.id]}"] if page.id in HEADINGS else []
    lines += ["", f"### {page.id}", "", page.cause, ""]
    if profile := profile_of(page):
        lines += ['```yaml title="headway.yaml"', profile.rstrip(), "```", ""]
    if command_of(page):
        command, printed = printed_by(page)
        lines += ["```console", f"$ {command}", printed.rstrip(), "```"]
    else:
        lines += [f"**Example:** {page.example}"]
    return "\n".join([*lines, "", f"**Fix:** {page.fix}", ""])
