"""The walks in docs/architecture.md are those that prepare(), a batch, a step and a save take."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import headway  # noqa: E402
from headway import Accelerator  # noqa: E402

PACKAGE = Path(headway.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
MOST = 8


def walk(name: str) -> list[str]:
    """Return the functions of a walk, each as `file: function`."""
    found = re.search(rf"^```walk {name}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return [re.findall(r"^\S+: \w+", line)[0] for line in found[1].splitlines()]


def called(action: Callable[[], object]) -> list[str]:
    """Return the functions of ours in the order in which they are first called."""
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            seen[f"{path.relative_to(PACKAGE).as_posix()}: {frame.f_code.co_name}"] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return [*seen]


@pytest.mark.parametrize("name", ["prepare", "batch", "step", "checkpoint"])
def test_a_walk_of_the_page_is_the_one_that_is_taken(name: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(8, 2), 2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 2)).mean())
            optimizer.step()

    def prepare() -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.prepare(optimizer, torch.utils.data.DataLoader(torch.ones(8, 2)), model)

    action: dict[str, Callable[[], object]] = {
        "prepare": prepare,
        "batch": lambda: next(iter(loader)),
        "step": step,
        "checkpoint": lambda: accelerator.save_state(tmp_path / "saved"),
    }
    told = walk(name)
    assert len(told) <= MOST
    taken = called(action[name])
    assert [line for line in taken if line in told] == told
