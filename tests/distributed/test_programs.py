"""What Python runs, a launch runs: the same output and exit code, with one rank and with two."""

from __future__ import annotations

import re
import sys
import zipapp
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from py_compile import compile as compile_file
from typing import NamedTuple

import pytest

from tests.distributed.launching import execute, launch, on_linux

pytestmark = on_linux

TELLS = """
import sys
print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
"""
MOVES = "import os, sys\nos.chdir('/')\nimport side\nprint(sys.path[0], side.NAME)\n"
SIDE = "NAME = 'side'\n"
SHELL = b"#!/bin/sh\n" + b"# a shell starts this archive\n" * 200 + b"exit\n"


class Case(NamedTuple):
    words: Sequence[str]  # after `python`
    files: dict[str, str | bytes]
    build: Callable[[], object] = lambda: None


def archive(name: str, *, prefix: bytes = b"", compressed: bool = False) -> Callable[[], object]:
    """Return what packs the folder `app` into an archive, behind a prefix."""

    def build() -> None:
        kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
        Path(name).write_bytes(prefix)
        with zipfile.ZipFile(name, "a", kind) as packed:
            for path in sorted(Path("app").rglob("*")):
                packed.write(path, path.relative_to("app"))

    return build


def compiled(source: str, target: str) -> Callable[[], object]:
    def build() -> None:
        compile_file(source, target, doraise=True)
        Path(source).unlink()

    return build


def of_text(text: str, name: str = "script.py", *args: str) -> Case:
    return Case([name, *args], {name: text})


def app(text: str, *words: str, build: Callable[[], object] = lambda: None) -> Case:
    return Case(
        words, {"app/__main__.py": text, "app/side.py": SIDE, "app/data.txt": "data"}, build
    )


PICKLES = "import pickle\nclass A: x = 1\nprint(pickle.loads(pickle.dumps(A())).x, A.__module__)\n"
SPAWNS = """
import multiprocessing
def double(number): return 2 * number
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(double, [1, 2]))
"""
READS = "import pkgutil\nprint(pkgutil.get_data('side', 'data.txt'))\n"
ASKS = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('n', type=int)\n"
TESTS = "import doctest\ndef one():\n    '''\n    >>> one()\n    1\n    '''\n    return 1\n"
HINTS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import get_type_hints
@dataclass
class A: x: int = 1
print(A(), get_type_hints(A), __annotations__ if "__annotations__" in dir() else {})
"""
PACKAGE: dict[str, str | bytes] = {
    "package/__init__.py": "",
    "package/__main__.py": TELLS + "from .side import NAME; print(NAME)\n",
    "package/tool.py": TELLS + "from .side import NAME; print(NAME)\n",
    "package/side.py": SIDE,
}

CASES = {
    "a script": of_text(TELLS, "script.py", "-x", "", "a b"),
    "a script in a folder": Case(
        ["sub/x.py"], {"sub/x.py": TELLS + "import side", "sub/side.py": SIDE}
    ),
    "a link": Case(
        ["link.py"],
        {"sub/x.py": TELLS + "import side", "sub/side.py": SIDE},
        lambda: Path("link.py").symlink_to("sub/x.py"),
    ),
    "an absolute path": Case(["/proc/self/cwd/script.py"], {"script.py": "print(1)"}),
    "a path with dots": Case(["./sub/../x.py"], {"x.py": TELLS, "sub/y": ""}),
    "a path from here": Case(["./x.py"], {"x.py": TELLS}),
    "a name with a space": of_text(TELLS, "my script.py"),
    "a name that is not ASCII": of_text(TELLS, "entraîner.py"),
    "no suffix": of_text(TELLS, "script"),
    "another suffix": of_text(TELLS, "script.txt"),
    "a byte order mark": Case(["script.py"], {"script.py": b"\xef\xbb\xbfprint('\xc3\xa9')\n"}),
    "another encoding": Case(
        ["script.py"], {"script.py": b"# coding: latin-1\nprint(ascii('\xe9'))\n"}
    ),
    "line ends of Windows": Case(
        ["script.py"], {"script.py": b"if 1:\r\n    print('\\\r\na')\r\n"}
    ),
    "an empty script": of_text(""),
    "a script that moves": Case(["sub/x.py"], {"sub/x.py": MOVES, "sub/side.py": SIDE}),
    "a folder": app(TELLS + "import side", "app", "a"),
    "a folder that moves": app(MOVES, "app"),
    "a folder with a slash": app(MOVES, "app/"),
    "a compiled folder": app(TELLS, "app", build=compiled("app/__main__.py", "app/__main__.pyc")),
    "a zip": app(TELLS + "import side", "app.zip", "a", build=archive("app.zip")),
    "a zip that moves": app(MOVES, "app.zip", build=archive("app.zip")),
    "a compressed zip": app(MOVES, "app.zip", build=archive("app.zip", compressed=True)),
    "a zip without a suffix": app(MOVES, "packed", build=archive("packed")),
    "a zip named as a script": app(MOVES, "x.py", build=archive("x.py", compressed=True)),
    "a zipapp": app(
        TELLS,
        "app.pyz",
        build=lambda: zipapp.create_archive("app", "app.pyz", interpreter="/usr/bin/env python3"),
    ),
    "an archive behind a shell script": app(
        MOVES, "app.pex", build=archive("app.pex", prefix=SHELL, compressed=True)
    ),
    "data in a zip": app(READS, "app.zip", build=archive("app.zip")),
    "a class of a zip": app(PICKLES, "app.zip", build=archive("app.zip")),
    "a compiled script": of_text(TELLS)._replace(
        words=["x.pyc"], build=compiled("script.py", "x.pyc")
    ),
    "a compiled script without a suffix": of_text(TELLS)._replace(
        words=["packed"], build=compiled("script.py", "packed")
    ),
    "a compiled script in a folder": Case(
        ["sub/x.pyc"],
        {"sub/x.py": MOVES, "sub/side.py": SIDE},
        compiled("sub/x.py", "sub/x.pyc"),
    ),
    "a module": Case(["-m", "package.tool", "-m", "x"], PACKAGE),
    "a package": Case(["-m", "package"], PACKAGE),
    "a module of one file": Case(["-m", "single", "a"], {"single.py": TELLS}),
    "a class of __main__": of_text(PICKLES),
    "processes of its own": of_text(SPAWNS),
    "type hints": of_text(HINTS),
    "its own source": of_text("import inspect\ndef f(): return 1\nprint(inspect.getsource(f))\n"),
    "its own doctests": of_text(TESTS + "print(doctest.testmod())\n"),
    "its own unit tests": of_text("import unittest\nprint('begun', flush=True)\nunittest.main()\n"),
    "arguments that are refused": of_text(ASKS + "parser.parse_args()\n", "script.py", "x"),
    "the help of a zip": app(
        ASKS + "parser.parse_args()\n", "app.zip", "-h", build=archive("app.zip")
    ),
}
QUICK = {"a compiled script", "a module", "a folder that moves", "an archive behind a shell script"}
"""Those that run with two ranks in the usual suite."""


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=() if count == 2 and name in QUICK else pytest.mark.long)
        for name in CASES
        for count in (1, 2)
    ],
)
def test_a_program_prints_and_exits_as_under_plain_python(name: str, count: int) -> None:
    case = CASES[name]
    for path, text in case.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(text.encode() if isinstance(text, str) else text)
    case.build()
    plain = execute([sys.executable, *case.words])
    # one rank: as a process that libraries may be hooked in, which is not plain Python's
    more = ["--num-processes", "2"] if count == 2 else ["--set", "library_hooks=yes"]
    done = launch("-q", "--cpu", *more, *case.words, code=plain.returncode)
    shown = [re.sub(r"^\[\d\] ", "", line) for line in done.stdout.splitlines()]
    assert sorted(shown) == sorted(plain.stdout.splitlines() * count), done.stderr
