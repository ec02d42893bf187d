"""Generators go on where their states were taken, also after a way through JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from headway.checkpoint.values import decode, encode  # noqa: E402
from headway.distributed.rng import generator_states, set_generator_states  # noqa: E402

CPU = torch.device("cpu")


def draw() -> list[Any]:
    numpy = pytest.importorskip("numpy")
    return [random.gauss(0, 1), numpy.random.normal(), torch.rand(1).item(), random.random()]


def test_generators_go_on_where_they_were() -> None:
    draw()
    tensors: dict[str, Any] = {}
    text = json.dumps(encode(generator_states(CPU), "own", tensors))
    expected = draw() + draw()
    set_generator_states(decode(json.loads(text), tensors), CPU)
    assert draw() + draw() == expected
