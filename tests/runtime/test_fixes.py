"""The fix of each error of the runtime and of the commands is applied literally, and helps."""

from __future__ import annotations

import re
import shlex
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway import utils
from headway.commands.main import main
from headway.errors import HeadwayError
from headway.logging import get_logger

MENDED = Path(__file__).with_name("mended.txt").read_text().splitlines()
"""What is wrong -> what the fix makes of it; `so` are words of the fix."""


@pytest.mark.parametrize("row", MENDED)
def test_code_changed_as_the_fix_says_is_no_error_any_more(row: str) -> None:
    code, mended = row.split(" -> ")
    with pytest.raises(HeadwayError) as refused:
        exec(code, names())  # noqa: S102
    marks = re.findall("`([^`]+)`", mended)
    assert marks
    assert all(mark in refused.value.problems[0].fix for mark in marks), refused.value
    exec(mended.replace("`", ""), names())  # noqa: S102


def names() -> dict[str, Any]:
    model, one = torch.nn.Linear(1, 1), torch.ones(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        **{name: getattr(module, name) for module in (headway, utils) for name in module.__all__},
        "torch": torch,
        "get_logger": get_logger,
        "model": model,
        "one": one,
        "loss": model(one),
        "accelerator": headway.Accelerator(cpu=True, project_dir="runs"),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "loader": torch.utils.data.DataLoader(range(8)),  # type: ignore[arg-type]
        "PLUGIN": utils.GradientAccumulationPlugin(),
    }


@pytest.mark.parametrize(
    "words",
    ["nosuch", "config nosuch", "config get nosuch", "why nosuch", "logs nosuch", "stack 999999"],
)
def test_a_command_that_a_fix_names_runs(words: str) -> None:
    with redirect_stderr(StringIO()) as text:
        assert main(words.split()) == 2
    named = re.findall("`headway ([^`]+)`", text.getvalue().partition("fix:")[2])
    for command in named:
        with suppress(SystemExit):  # after --help
            assert main(shlex.split(command)) == 0
    assert named
