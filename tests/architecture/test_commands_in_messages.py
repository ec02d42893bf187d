"""No message has a command that changes what is not a regular file of the user's own.

What a fix names exists: flags, commands, variables, and methods of an Accelerator.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from headway import errors
from headway.errors import Code, ConfigError, HeadwayError, Problem, WorkerFailed, did_you_mean
from headway.launcher.diagnosis.reasons import REASONS
from tests.architecture.test_surface import FILE as SURFACE
from tests.architecture.tree import product_files

CHANGE_NOTHING = {
    *("headway", "accelerate", "torchrun", "squeue", "sinfo", "dmesg", "nvidia-smi", "ip", "ssh"),
    "openssl",  # rand
    *("cd", "export", "unset", "ulimit", "fg"),  # the user's own shell
    *("pip", "conda", "uv", "arch", "docker", "jupyter"),  # packages, and files beside those there
    "git",  # log
}
ONLY = {
    "chmod": "chmod o-w {0}",  # a profile, which the user selects
    "kill": "kill -CONT {}",  # the user's own launch, that was suspended
    "scancel": "scancel {}",  # the user's own job, that was just submitted
    "sudo": "sudo -u {} headway stack {}",
}
OF_OTHERS = {"--me", "--mixed_precision", "--ntasks-per-node", "--shm-size", "--to", "--version"}
NO_PROGRAMS = {"bf16", "checkpoints", "def", "device", "fp16", "from", "if", "launch", "no", "with"}
NO_PROGRAMS |= {"write"}  # an answer


def texts(code: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the strings in code that are no docstrings, with {} for what is filled in."""
    reread = {id(node.value) for node in ast.walk(code) if isinstance(node, ast.Expr)}
    for node in ast.walk(code):
        if isinstance(node, ast.JoinedStr):
            reread |= {id(part) for part in node.values}
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and id(node) not in reread:
            yield node.lineno, node.value if isinstance(node.value, str) else ""


def commands(path: Path) -> Iterator[tuple[int, str]]:
    """Yield what stands between backticks in messages."""
    for line, text in texts(ast.parse(path.read_text())):
        for quoted in re.findall(r"`([^`]+)`", text):
            yield line, quoted


def programs(command: str) -> Iterator[str]:
    """Yield the programs that a line of a shell runs, as far as they are written out."""
    for part in re.split(r"; |&& |\| |\$\(", command):
        words = [word for word in part.split() if not re.match(r"\w+=", word)]
        if words and re.fullmatch(r"[a-z][a-z0-9-]*", words[0]):
            yield words[0]


def test_every_command_that_a_message_names_is_known_to_change_nothing_of_others() -> None:
    seen = set()
    for path in product_files().values():
        for line, command in commands(path):
            for name in programs(command):
                seen.add(name)
                where = f"{path}, line {line}: `{command}`"
                if name in ONLY:
                    assert command == ONLY[name], where
                else:
                    assert name in CHANGE_NOTHING | NO_PROGRAMS, where
    assert seen >= {*ONLY, "export", "pip", "ulimit"}


def fixes() -> Iterator[str]:
    """Yield the fixes of all errors, with {} for what is filled in."""
    yield from (reason.fix for reason in REASONS)
    for path in product_files().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "fix":
                yield from (text for _, text in texts(node.value))


def test_what_a_fix_names_exists() -> None:
    known = {word for line in SURFACE.read_text().splitlines() for word in (line, *line.split())}
    seen = set()
    for fix in fixes():
        seen |= {*re.findall(r"(?<![\w-])--[a-z][\w-]+|`headway [a-z]+|\bHEADWAY_\w+", fix)}
        seen |= {f"Accelerator.{name}" for name in re.findall(r"\baccelerator\.(\w+)", fix)}
    assert {name.lstrip("`") for name in seen} - known == OF_OTHERS


def test_an_error_is_three_lines() -> None:
    error = ConfigError(
        "device is 'tpu'", where="profile x, line 7", fix="write cpu", code=Code.BAD_VALUE
    )
    assert str(error).splitlines() == [
        "device is 'tpu' [HW002]",
        "  from: profile x, line 7",
        "  fix:  write cpu",
    ]


def test_several_problems_make_one_error() -> None:
    error = ConfigError.of([Problem("a", "b", "c", None), Problem("d", "e", "f", None)])
    assert isinstance(error, ConfigError)
    assert len(str(error).splitlines()) == 6


def test_a_failed_worker_keeps_its_exit_code() -> None:
    assert WorkerFailed("rank 1 failed", where="x.py", fix="look", exit_code=42).exit_code == 42


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    drawn = errors.__doc__ or ""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, HeadwayError):
            (line,) = [line for line in drawn.splitlines() if f" {kind.__name__} " in line]
            if "exit " in line and line.split()[-1].isdecimal():
                assert line.split()[-1] == str(kind.exit_code)


def test_a_typo_gets_the_nearest_name_and_nonsense_gets_none() -> None:
    assert did_you_mean("num_procesess", ["num_processes", "device"]) == "num_processes"
    assert did_you_mean("xyzzy", ["num_processes", "device"]) is None
