"""Several ranks train the weights of one plain PyTorch process; see benchmarks/parity.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.distributed, pytest.mark.long]

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "parity.py"
TOLERANCES = {"no": 1e-6, "bf16": 1e-2}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_weights_are_those_of_one_process_on_the_same_global_batches(ranks: int) -> None:
    words = [sys.executable, str(BENCHMARK), "--json", "--ranks", str(ranks)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    differences = json.loads(done.stdout)[str(ranks)]
    assert len(differences) == 8
    precisions = [name for name in TOLERANCES for _ in range(4)]
    for precision, difference in zip(precisions, differences, strict=True):
        assert difference <= TOLERANCES[precision], differences
