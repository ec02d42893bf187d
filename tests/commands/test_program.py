"""What is no Python script is refused with its kind and the way to go on."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.commands.program import program_from
from headway.errors import ConfigError
from tests.commands.running import python, run


def program(*words: str, no_python: bool = False) -> tuple[str, str]:
    found = program_from(SimpleNamespace(module=None, no_python=no_python), words)
    return found.kind, found.name


def refused(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        program(*words)
    return caught.value


def archive(member: str) -> bytes:
    with zipfile.ZipFile("made.zip", "w") as made:
        made.writestr(member, "print('ran')")
    return Path("made.zip").read_bytes()


NO_SCRIPTS = {
    "n.ipynb": ('{"cells": []}', "a Jupyter notebook", "nbconvert --to script ./n.ipynb"),
    "N.IPYNB": ('{"cells": []}', "a Jupyter notebook", "nbconvert --to script ./N.IPYNB"),
    "run.sh": ("python train.py", "a shell script", "--no-python bash ./run.sh"),
    "my run": ("#!/bin/sh\nls", "a shell script", "--no-python bash './my run'"),
    "job": ("#!/usr/bin/env bash\nls", "a shell script", "--no-python bash ./job"),
    "mine.yaml": ("device: cpu", "a YAML file", "--profile ./mine.yaml"),
    "prog": ("\x7fELF\x02\0", "a compiled program", "--no-python ./prog"),
    "weights": ("\x80\x02\0\0", "a binary file", "name a Python script"),
}


@pytest.mark.parametrize("name", NO_SCRIPTS)
def test_a_file_of_another_kind_is_named_with_what_to_do(name: str) -> None:
    text, kind, fix = NO_SCRIPTS[name]
    Path(name).write_bytes(text.encode("latin-1"))
    (problem,) = refused(name, "--lr", "3").problems
    assert kind in problem.what
    assert repr(name) in problem.what
    assert fix in problem.fix


def test_an_archive_is_a_program_if_it_has_a_main() -> None:
    Path("model.pt").write_bytes(archive("data.pkl"))
    assert "a zip archive without a __main__.py" in refused("model.pt").problems[0].what
    Path("app.pyz").write_bytes(archive("__main__.py"))
    assert program("app.pyz") == ("script", "app.pyz")


def test_a_directory_without_a_main_is_no_script() -> None:
    Path("folder").mkdir()
    assert "is a directory without a __main__.py" in refused("folder").problems[0].what
    Path("folder/__main__.py").touch()
    assert program("folder") == ("script", "folder")


RUN_BY_PYTHON = {
    "train": "print(1)",
    "train.py": "#!/bin/sh\n''''exec python $0 # '''",
    "tool": "#!/usr/bin/env -S uv run --script\n",
    "latin.py": "# -*- coding: latin-1 -*-\n'\xe9'",
    "odd.txt": "print(1)",
    "empty": "",
}


@pytest.mark.parametrize("name", RUN_BY_PYTHON)
def test_what_python_runs_is_a_script_whatever_its_name(name: str) -> None:
    Path(name).write_bytes(RUN_BY_PYTHON[name].encode("latin-1"))
    assert program(name) == ("script", name)


def test_a_compiled_script_is_a_script() -> None:
    import py_compile

    Path("train.py").write_text("print(1)")
    py_compile.compile("train.py", "train.pyc")
    assert program("train.pyc") == ("script", "train.pyc")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_script_from_a_pipe_is_not_read_beforehand() -> None:
    os.mkfifo("pipe")  # to open it would wait for a writer
    assert program("pipe") == ("script", "pipe")
    code, text = run("launch", "--cpu", "--num-processes", "2", "pipe")
    assert code == 2
    assert "'pipe' is read from a pipe or descriptor" in text


@pytest.mark.processes
@pytest.mark.skipif(not os.path.exists("/dev/stdin"), reason="needs the name of a descriptor")
def test_a_script_from_stdin_is_run_by_one_process_and_refused_for_ranks() -> None:
    def from_pipe(*words: str) -> subprocess.CompletedProcess[str]:
        command = ("-m", "headway", "launch", "-q", "--cpu", *words, "/dev/stdin")
        return python(*command, given="print('ran')")

    for words in (["--num-processes", "2"], ["--supervise"]):
        done = from_pipe(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "'/dev/stdin' is read from a pipe or descriptor" in done.stderr
    for words in ([], ["--in-process"]):
        done = from_pipe(*words)
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


@pytest.mark.parametrize("name", ["python", "python3", "/usr/bin/python3.12", sys.executable])
def test_the_interpreter_is_no_script(name: str) -> None:
    assert "leave it out" in refused(name, "train.py").problems[0].fix


def make_unreadable_file() -> None:
    Path("train.py").chmod(0)


def make_unreadable_main() -> None:
    Path("sub/__main__.py").touch(0)


@pytest.mark.wording
@pytest.mark.parametrize(
    ("make", "script"), [(make_unreadable_file, "train.py"), (make_unreadable_main, "sub")]
)
def test_the_fix_for_an_unreadable_script_makes_it_readable(
    make: Callable[[], None], script: str, ordinary_user: None
) -> None:
    os.chmod(".", 0o777)
    Path("train.py").touch()
    Path("sub").mkdir()
    make()
    (problem,) = refused(script).problems
    assert "no permission to read" in problem.what
    command, mode, path = problem.fix.strip("`").split()
    assert (command, mode) == ("chmod", "u+r")
    Path(path).chmod(Path(path).stat().st_mode | 0o400)
    assert program(script) == ("script", script)


def test_the_folder_that_keeps_a_script_from_being_read_is_named(ordinary_user: None) -> None:
    os.chmod(".", 0o777)
    Path("sub/below").mkdir(parents=True)
    Path("sub/below/train.py").touch()
    Path("sub").chmod(0)
    (problem,) = refused("sub/below/train.py").problems
    assert problem.fix.startswith(f"{Path.cwd() / 'sub'} ")


def test_a_script_that_cannot_be_looked_up_is_one_error() -> None:
    Path("loop").symlink_to("loop")
    for name in ("loop", "x" * 300, "nosuch.py", "made.py/below"):
        Path("made.py").touch()
        assert refused(name).problems[0].fix


def test_no_other_kind_of_file_is_run_or_planned() -> None:
    Path("n.ipynb").write_text("{}")
    for words in ((), ("--dry-run",), ("--num-processes", "2")):
        code, text = run("launch", *words, "n.ipynb")
        assert code == 2
        assert "n.ipynb" in text


@pytest.mark.wording
@pytest.mark.processes
def test_the_fix_for_a_shell_script_runs_it() -> None:
    Path("run.sh").write_text("echo ran in $0")
    words = refused("run.sh").problems[0].fix.partition("headway ")[2].split()
    done = python("-m", "headway", words[0], "-q", "--cpu", *words[1:])
    assert done.stdout == "ran in ./run.sh\n", done.stderr


@pytest.mark.parametrize(
    ("text", "runtime"),
    [
        ("import torch\nfrom transformers import Trainer\n", "transformers"),
        ("    from accelerate.utils import set_seed\n", "accelerate"),
        ("import torch, numpy\n", "torch"),
        ("import os, torch as t; t.rand(1)\n", "torch"),
        ("from mine import torch\nimport \n", ""),
        ("from headway import Accelerator\nimport torch\n", ""),
        ("import my_training\n", ""),
        ("", ""),
    ],
)
def test_a_script_says_what_it_trains_with_unless_it_names_headway(text: str, runtime: str) -> None:
    Path("train.py").write_text(text)
    parsed = SimpleNamespace(module=None, no_python=False)
    assert program_from(parsed, ["train.py"]).imports == runtime


def test_a_library_that_a_module_beside_the_script_imports_is_known() -> None:
    files = {
        "train.py": "import torch, json\nfrom own.steps import (train)\n",
        "own/__init__.py": "",
        "own/steps/__init__.py": "from .deep import *",
        "own/steps/deep.py": "from ..top import fit",
        "own/top.py": "import train\nfrom transformers import Trainer",
        "own/unused.py": "import lightning",
    }
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, "utf-8")
    found = program_from(SimpleNamespace(module=None, no_python=False), ["train.py"])
    assert (found.imports, found.libraries) == ("torch", ("transformers",))
    found = program_from(SimpleNamespace(module="own.steps", no_python=False), [])
    assert found.libraries == ("transformers",)
