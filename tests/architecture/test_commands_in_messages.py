"""No message has a command that changes what is not a regular file of the user's own."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.settings import profile_edit
from headway.settings.profile_files import chmod_fix, group_may_not_set_env
from tests.architecture.tree import product_files

CHANGE_NOTHING = {
    *("headway", "accelerate", "torchrun", "squeue", "sinfo", "dmesg", "nvidia-smi", "ip", "ssh"),
    "openssl",  # rand
    *("cd", "export", "unset", "ulimit", "fg"),  # the user's own shell
    *("pip", "conda", "uv", "arch", "docker", "jupyter"),  # packages, and files beside those there
}
ONLY = {
    "chmod": "chmod {} {}",  # made by `chmod_fix`, which looks at the file
    "kill": "kill -CONT {}",  # the user's own launch, that was suspended
    "scancel": "scancel {}",  # the user's own job, that was just submitted
    "sudo": "sudo -u {} headway stack {}",
}
NO_PROGRAMS = {"bf16", "checkpoints", "def", "device", "fp16", "from", "if", "launch", "no", "with"}
NO_PROGRAMS |= {"write"}  # an answer


def texts(code: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the strings in code that are no docstrings, with {} for what is filled in."""
    left_out = {id(node.value) for node in ast.walk(code) if isinstance(node, ast.Expr)}
    for node in ast.walk(code):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values}
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and id(node) not in left_out:
            yield node.lineno, node.value if isinstance(node.value, str) else ""


def commands(path: Path) -> Iterator[tuple[int, str]]:
    """Yield what stands between backticks in messages, and what remedies let the user run."""
    module = ast.parse(path.read_text())
    for line, text in texts(module):
        for quoted in re.findall(r"`([^`]+)`", text):
            yield line, quoted
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "run":
            for argument in node.args:
                yield from texts(argument)


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


def of_read_only_profile(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        profile_edit._refuse_to_write(path, "")
    return caught.value.problems[0].fix


MADE_BY: dict[str, Callable[[str], str]] = {
    "o-w": lambda path: chmod_fix("o-w", path),
    "g-w": lambda path: group_may_not_set_env(path, "lab").problems[0].fix,
    "u+w": of_read_only_profile,
}


@pytest.fixture
def refused_access(monkeypatch: pytest.MonkeyPatch, own_surroundings: None) -> None:
    """Let a file be neither written to nor executed, also for root."""
    usual = os.access

    def access(path: str, mode: int, **options: bool) -> bool:
        return usual(path, mode, **options) and (mode != os.W_OK)

    monkeypatch.setattr(os, "access", access)


@pytest.mark.usefixtures("refused_access")
@pytest.mark.parametrize("kind", ["a file", "a device", "a folder", "a pipe", "another user's"])
@pytest.mark.parametrize("change", MADE_BY)
def test_a_mode_is_changed_of_a_regular_file_of_this_user_alone(
    change: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path("target")
    if kind == "a pipe":
        os.mkfifo(target)
    elif kind == "a folder":
        target.mkdir()
    elif kind == "a device":
        target = Path("/dev/zero")
    else:
        target.touch()
    Path("link").symlink_to(target)
    if kind == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    fix = MADE_BY[change]("./link")
    assert fix or change == "o-w"
    assert ("chmod" in fix) == (kind == "a file")
    assert f"`chmod {change} " in fix or kind != "a file"
