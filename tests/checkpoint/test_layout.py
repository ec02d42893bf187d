"""What somebody writes into the state of a checkpoint, with right checksums, is refused in full."""

from __future__ import annotations

import json
import os
import random
import shutil
import traceback
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from headway import Accelerator  # noqa: E402
from headway.errors import CheckpointError, UsageError  # noqa: E402
from headway.precision.precision import Fp16, PrecisionSettings  # noqa: E402
from tests.checkpoint.saved import rewrite  # noqa: E402

TORCH = os.path.dirname(torch.__file__)
OTHERS: list[Any] = [
    *(None, True, -1, 0, 2**70, 0.5, "", "x", "\ud800", [], {}, [[]], {"dict": []}),
    *({"tuple": []}, {"tuple": [1, 2]}, {"number": "nan"}, {"bytes": "AAAA"}, {"set": [1]}),
    *({"dict": [["a", 1]]}, {"counter": [["a", 1]]}, {"unknown": 1}, {"tensor": "nothing"}),
]


class Trained:
    """A training in the middle of a pass and of an accumulation, in fp16."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        settings = PrecisionSettings()
        self.accelerator.parts.training.precision = Fp16().set_up(torch.device("cpu"), settings)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        own = torch.Generator()
        data: Any = torch.randn(12, 2)
        loader: DataLoader[Any] = DataLoader(data, batch_size=2, shuffle=True, generator=own)
        self.objects = self.accelerator.prepare(model, optimizer, schedule, loader)

    def step(self, times: int) -> None:
        model, optimizer, schedule, loader = self.objects
        for _, batch in zip(range(times), loader, strict=False):
            with self.accelerator.accumulate(model):
                self.accelerator.backward(model(batch).sum())
                optimizer.step()
                schedule.step()

    def bits(self) -> str:
        """Return all that a checkpoint could change."""
        model, optimizer, schedule, loader = self.objects
        training = self.accelerator.parts.training
        states = [one.state_dict() for one in (*self.objects, training.precision)]
        generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
        counts = optimizer.step_count, schedule.seen_steps, training.accumulation.state_dict()
        gradients = [one.grad for one in model.parameters()]
        with torch._tensor_str.printoptions(threshold=2**30, precision=17):
            return f"{states} {generators} {counts} {gradients} {loader.epoch}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trained = Trained()
    trained.step(3)
    return Path(trained.accelerator.save_state(tmp_path_factory.mktemp("saved") / "a"))


def change(folder: Path, name: str, draw: random.Random) -> str:
    """Put something else in one place of a file; return what is changed."""
    value = json.loads((folder / name).read_text())
    parent, key = draw.choice([*places(value)])
    before, kind = parent[key], draw.choice(["delete", "sibling", "other", "other", "other"])
    if kind == "delete":
        del parent[key]
    elif kind == "sibling":
        keys = [*parent] if isinstance(parent, dict) else range(len(parent))
        parent[key] = deepcopy(parent[draw.choice(keys)])
    else:
        parent[key] = draw.choice(OTHERS)
    (folder / name).write_text(json.dumps(value))
    rewrite(folder)
    return f"{name}, {key}: {str(before)[:60]}; {kind}"


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all that is in a value: what has it, and where."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in parts:
        # of the 624 numbers of a generator the first few
        if not (isinstance(value, list) and len(value) > 600 and key > 3):
            yield value, key
            if isinstance(one, dict | list):
                yield from places(one)


def outcome(live: Trained, folder: Path, how: str) -> str:
    """Load what somebody has changed; what is refused has changed nothing."""
    before = live.bits()
    try:
        live.accelerator.load_state(folder)
    except CheckpointError as error:
        (problem,) = error.problems
        return "refused" if live.bits() == before and str(folder) in problem.where else str(error)
    try:
        live.step(2)
    except Exception as error:  # torch's own step judges what its optimizer remembers
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(TORCH):
            raise
    return "loaded"


def tried(saved: Path, folder: Path, seeds: range) -> Counter[str]:
    found: Counter[str] = Counter()
    live = Trained()
    for seed in seeds:
        draw = random.Random(seed)
        shutil.copytree(saved, folder)
        name = draw.choice(["values_rank0.json", "values.json"])
        how = f"seed {seed}, {change(folder, name, draw)}"
        try:
            ended = outcome(live, folder, how)
        except (UsageError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise AssertionError(how) from error
        assert ended in ("refused", "loaded"), how
        if ended == "loaded":
            live = Trained()
        found[ended] += 1
        shutil.rmtree(folder)
    return found


@pytest.mark.slow
def test_states_that_no_save_writes_are_refused_and_change_nothing(
    saved: Path, tmp_path: Path
) -> None:
    assert tried(saved, tmp_path / "a", range(150))["refused"] > 75


@pytest.mark.long
def test_2000_states_that_no_save_writes_are_refused_and_change_nothing(
    saved: Path, tmp_path: Path
) -> None:
    assert tried(saved, tmp_path / "a", range(1000, 3000))["refused"] > 1000


@pytest.mark.parametrize("position", [-1, 625, 10**6])
def test_a_position_in_numpy_s_generator_that_reads_other_memory_is_refused(
    position: int, saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "a"))
    path = folder / "values_rank0.json"
    own = json.loads(path.read_text())
    state = next(one for key, one in own["dict"] if key == "generators")
    numpy = next(one for key, one in state["dict"] if key == "numpy")
    assert 0 <= numpy["tuple"][2] <= 624
    numpy["tuple"][2] = position
    path.write_text(json.dumps(own))
    rewrite(folder)
    live = Trained()
    before = live.bits()
    with pytest.raises(CheckpointError, match="generators"):
        live.accelerator.load_state(folder)
    assert live.bits() == before
