"""What plain Python runs, a launch runs; a notebook, a profile and a missing file are refused."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from headway.commands.launch import make_parser
from headway.commands.program_args import other_environment, program_from
from headway.errors import ConfigError
from tests.commands.running import python, run


def program(*words: str) -> tuple[str, str]:
    parser = make_parser()
    own, rest = parser.split(words)
    found = program_from(parser, parser.parse_args(own), own, rest)
    return found.kind, found.name


def refused(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        program(*words)
    return caught.value


NOT_PYTHON = {
    "n.ipynb": ("a Jupyter notebook", "nbconvert --to script n.ipynb"),
    "my N.IPYNB": ("a Jupyter notebook", "nbconvert --to script 'my N.IPYNB'"),
    "mine.yaml": ("a YAML file", "--profile mine.yaml"),
}


@pytest.mark.parametrize("name", NOT_PYTHON)
def test_a_notebook_and_a_profile_are_named_with_what_to_do(name: str) -> None:
    kind, fix = NOT_PYTHON[name]
    Path(name).touch()
    (problem,) = refused(name, "--lr", "3").problems
    assert kind in problem.what
    assert repr(name) in problem.what
    assert fix in problem.fix


def test_a_folder_or_archive_without_a_main_is_no_script() -> None:
    Path("folder").mkdir()
    assert "is a directory without a __main__.py" in refused("folder").problems[0].what
    Path("folder/__main__.py").touch()
    assert program("folder") == ("script", "folder")
    for name, module in (("whole.pyz", "__main__.py"), ("other.zip", "train.py")):
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr(module, "print(1)\n")
    assert "is a zip archive without a __main__.py" in refused("other.zip").problems[0].what
    assert program("whole.pyz") == ("script", "whole.pyz")


@pytest.mark.parametrize("name", ["train", "train.py", "train.pyc", "app.pyz", "run.sh", "odd.txt"])
def test_every_other_file_is_left_to_python(name: str) -> None:
    Path(name).touch()
    assert program(name) == program("--", name) == ("script", name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_script_from_a_pipe_is_not_read_beforehand() -> None:
    os.mkfifo("pipe")  # to open it would wait for a writer
    assert program("pipe") == ("script", "pipe")
    code, text = run("launch", "--cpu", "--num-processes", "2", "pipe")
    assert code == 2
    assert "read the script 'pipe' from a pipe or descriptor" in text


@pytest.mark.processes
@pytest.mark.skipif(not os.path.exists("/dev/stdin"), reason="needs the name of a descriptor")
def test_a_script_from_stdin_is_run_by_one_process_and_refused_for_ranks() -> None:
    def from_pipe(*words: str) -> subprocess.CompletedProcess[str]:
        command = ("-m", "headway", "launch", "-q", "--cpu", *words, "/dev/stdin")
        return python(*command, given="print('ran')")

    for words in (["--num-processes", "2"], ["--supervise"]):
        done = from_pipe(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "read the script '/dev/stdin' from a pipe or descriptor" in done.stderr
    for words in ([], ["--in-process"]):
        done = from_pipe(*words)
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


MISSING = {
    "nope.py": "check the path; run a module with -m",
    "--wait=600 nope.py": "check the path; run a module with -m",
    "--wait 10m nope.py": "check the path; pass a value of --wait after '=': --wait=S",
    "--set -m nope": "check the path; run a module with -m; '-m' was read as the value of --set",
}


@pytest.mark.parametrize("words", MISSING)
def test_a_missing_script_that_may_be_a_value_of_the_flag_before_it_is_explained(
    words: str,
) -> None:
    assert refused(*words.split()).problems[0].fix == MISSING[words]


@pytest.mark.parametrize("name", ["python", "python3", "/usr/bin/python3.12", sys.executable])
def test_the_interpreter_is_no_script(name: str) -> None:
    assert "remove it" in refused(name, "train.py").problems[0].fix


@pytest.mark.parametrize("name", ["", ".x", "..x", "a.", "a..b"])
def test_a_module_name_that_python_refuses_starts_no_rank(name: str) -> None:
    assert refused("-m", name).problems[0].title == f"invalid module name {name!r} [HW008]"


def test_a_script_that_cannot_be_looked_up_is_one_error() -> None:
    Path("loop").symlink_to("loop")
    for name in ("loop", "x" * 300, "nosuch.py", "made.py/below"):
        Path("made.py").touch()
        assert refused(name).problems[0].fix


def test_an_active_environment_that_is_not_the_one_used_is_noted(tmp_path: Path) -> None:
    for name in ("used", "active", "without"):
        (tmp_path / name / "lib/python3.12/site-packages/other").mkdir(parents=True)
    (tmp_path / "active/lib/python3.12/site-packages/torch").mkdir()
    python = str(tmp_path / "used/bin/python")

    def notes(name: str, variable: str = "VIRTUAL_ENV") -> list[str]:
        return [*other_environment("train.py", python, {variable: str(tmp_path / name)})]

    fix = f"`uv pip install --python {tmp_path}/active/bin/python headway`"
    [note] = notes("active")
    assert fix in note
    (tmp_path / "active/lib/python3.12/site-packages/pip").mkdir()
    fix = f"`{tmp_path}/active/bin/python -m pip install headway`"
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        [note] = notes("active", variable)
        assert f"with {python}, not with {tmp_path}/active; fix: {fix}" in note
    assert not notes("used")
    assert f"not with {tmp_path}/without; fix: " in "".join(notes("without"))
    (tmp_path / ".venv").symlink_to(tmp_path / "active")
    beside = [*other_environment(str(tmp_path / "train.py"), python, {})]
    assert [f"not with {tmp_path}/.venv; fix: " in note for note in beside] == [True]
    base = {"CONDA_PREFIX": str(tmp_path / "without")}  # used by its path, below an active one
    python = str(tmp_path / ".venv/bin/python")
    assert not [*other_environment(str(tmp_path / "train.py"), python, base)]
