"""Benchmarks run: small ones to their end, those that need a GPU refuse to run without one."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import launching
from tests.docs.test_screens import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_pythons")]


def run(benchmark: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / benchmark), *options]
    environ = launching.environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    return launching.run(command, environ, timeout_s=170)


def test_the_gpu_benchmark_measures_each_contender_and_says_where_a_gpu_is_missing() -> None:
    refused = run("gpu.py")
    assert refused.returncode == 3
    assert "error:" in refused.stdout
    sizes = ["--blocks", "1", "--steps", "1", "--warm-up", "1", "--batch-size", "2"]
    done = run("gpu.py", "--size", "tiny", "--no-compile", *sizes, "--json", "result.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path("result.json").read_text())
    assert [row["contender"] for row in rows][:2] == ["by hand", "headway"]
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.distributed
@pytest.mark.long
def test_the_benchmarks_of_sharding_and_of_parity_compare_with_plain_torch() -> None:
    done = run("sharding.py", "--ranks=2", "--rounds=2", "--steps=1", "--width=16", "--layers=2")
    assert done.returncode in (0, 1), done.stderr
    assert "2 ranks: " in done.stdout
    assert len(json.loads(run("parity.py", "--json", "--ranks", "2").stdout)["2"]) == 8


COMPARED = {  # a small form of each benchmark, and what it compares
    "checkpoint.py --megabytes 13 --repeat 1": ["verify: headway"],
    "imports.py --repeat 1": ["import torch", "headway"],
    "growth.py --only loaders --repeat 1": ["1", "50"],
    "growth.py --only samples --repeat 1": ["pytorch", "headway", "headway, resumed"],
    "rendezvous.py --agents 8 --idle-s 1": ["headway's channel", "a counter in TCPStore"],
    "estimate.py --size small --only 'mlp sgd'": ["MLP SGD"],
}


@pytest.mark.long
@pytest.mark.parametrize("words", COMPARED)
def test_a_benchmark_measures_each_of_what_it_compares(words: str) -> None:
    done = run(*shlex.split(words), "--json", "result.json")
    assert done.returncode == 0, done.stderr
    seen = json.loads(Path("result.json").read_text())
    rows = seen if isinstance(seen, list) else [{"by": name} for name in seen]
    found = [row.get("by") or row.get("contender") or row["case"] for row in rows]
    assert found[: len(COMPARED[words])] == COMPARED[words]
    assert all(row.get("seconds", 1) > 0 for row in rows)
    assert all(abs(row.get("estimate", 0)) <= row.get("tolerance", 0) for row in rows)


@pytest.mark.distributed
@pytest.mark.long
def test_the_race_measures_a_kill_and_each_part_of_a_restart() -> None:
    sizes = ["--steps", "40", "--kills", "1", "--only", "headway"]
    done = run("race.py", *sizes, "--json", "result.json")
    assert done.returncode == 0, done.stderr
    undisturbed, killed = json.loads(Path("result.json").read_text())
    assert not undisturbed["kills"]
    (kill,) = killed["kills"]
    assert kill["first_s"] <= kill["new_s"]
    assert len(kill["rows"]) == 15
    assert sum(kill["rows"].values()) == pytest.approx(1e3 * kill["first_s"], abs=1)
