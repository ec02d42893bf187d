"""Transcripts: commands, and all that they print, in tests/commands/transcripts/*.txt.

    what the scene shows
      $ cat > headway.yaml
      | num_processes: 2
      $ headway config set --profile headway.yaml num_processes=4
      wrote ~/work/headway.yaml
        num_processes: 4  (was 2)

A scene is a line without margin. Its commands run in this process, in an empty home, on the
recorded machine that `on` names, else on a laptop. Lines with a bar are what a command reads:
`cat > FILE`, or standard input. An exit code other than 0 is shown in brackets, and no empty line.

    python -m tests.commands.test_transcripts     writes what is printed anew
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headway.commands import flags
from headway.commands.config import check, edit
from headway.commands.exchange import import_settings
from headway.commands.main import main as headway
from headway.machine.facts import Machine
from tests.conftest import forget_steering
from tests.machines.recorded import FOLDER as MACHINES
from tests.machines.recorded import load

FOLDER = Path(__file__).parent / "transcripts"
ACCELERATE = Path(__file__).parent / "exchange" / "accelerate"
"""Files that Accelerate's own ClusterConfig has written."""
MARGIN, COMMAND, INPUT = "  ", "  $ ", "  |"

Scene = tuple[str, list[str]]
"""A title, and the lines below it."""


def scenes(path: Path) -> list[Scene]:
    """Return the scenes of a transcript."""
    found: list[Scene] = []
    for line in path.read_text().splitlines():
        if line.startswith(MARGIN):
            found[-1][1].append(line)
        elif line:
            found.append((line, []))
    return found


def played(lines: Sequence[str]) -> Iterator[str]:
    """Run the commands among `lines`; yield these with what is printed now."""
    steps: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(COMMAND):
            steps.append((line.removeprefix(COMMAND), []))
        elif line.startswith(INPUT):
            steps[-1][1].append(line.removeprefix(INPUT).removeprefix(" "))
    with pytest.MonkeyPatch.context() as patch:
        be_on(load("laptop_cpu"), patch)
        for command, given in steps:
            yield COMMAND + command
            yield from (f"{INPUT} {line}".rstrip() for line in given)
            with pytest.MonkeyPatch.context() as environ:
                text, code = run(
                    shlex.split(command), "".join(f"{line}\n" for line in given), patch, environ
                )
            yield from (f"{MARGIN}{line}".rstrip() for line in text.splitlines() if line.strip())
            if code:
                yield f"{MARGIN}[{code}]"


def run(
    words: list[str], given: str, patch: pytest.MonkeyPatch, environ: pytest.MonkeyPatch
) -> tuple[str, int]:
    """Run one command; return what it prints on both streams, and its exit code."""
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environ.setenv(name, value)
    if words[0] == "on":
        be_on(load(words[1]), patch)
        return "", 0
    paths = [Path(word).expanduser() for word in words[1:] if word != ">"]
    if words[0] == "cp":  # a file of Accelerate, or a recorded machine
        (path,) = [at / words[1] for at in (ACCELERATE, MACHINES) if (at / words[1]).exists()]
        shutil.copy(path, words[1])
        return "", 0
    if words[:2] == ["cat", ">"]:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(given)
        return "", 0
    if words[0] == "cat":
        return paths[0].read_text().replace(str(Path.home()), "~"), 0
    environ.setattr(sys, "stdin", io.StringIO(given))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = headway(words[1:])
    return said.getvalue().replace(str(Path.home()), "~"), code


def be_on(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Let every command find this machine, and no kubectl."""
    for module in (flags, check, edit, import_settings):
        patch.setattr(module, "detect_machine", lambda *_, **__: machine)
    patch.setattr(shutil, "which", lambda *_, **__: None)


SCENES = {
    f"{path.stem}: {title}": lines
    for path in sorted(FOLDER.glob("*.txt"))
    for title, lines in scenes(path)
}


@pytest.mark.parametrize("title", SCENES)
def test_what_is_printed_is_what_the_transcript_has(title: str) -> None:
    assert list(played(SCENES[title])) == SCENES[title]


def main() -> None:
    home = Path.cwd()
    for path in FOLDER.glob("*.txt"):
        parts = []
        for title, lines in scenes(path):
            with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
                forget_steering(patch)
                work = Path(folder, "work")
                work.mkdir()
                patch.setenv("HOME", folder)
                patch.setenv("XDG_CONFIG_HOME", f"{folder}/.config")
                patch.chdir(work)
                parts.append("\n".join([title, *played(lines)]) + "\n")
            os.chdir(home)
        path.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
