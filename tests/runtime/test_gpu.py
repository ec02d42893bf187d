"""On a machine with CUDA GPUs: what is detected without torch, and how long its work takes."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from headway.ipc.step_clock import DATA, FORWARD, StepClock
from headway.machine.detection import detect_machine
from tests.distributed.launching import execute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_detection_and_torch_see_the_same_gpus_in_the_same_order() -> None:
    visible = detect_machine().visible_gpus
    assert len(visible) == torch.cuda.device_count()
    for index, gpu in enumerate(visible):
        there = torch.cuda.get_device_properties(index)
        assert gpu.name == there.name
        assert gpu.uuid.removeprefix("GPU-") == str(there.uuid)
        assert gpu.capability == (there.major, there.minor)


def test_detection_makes_no_cuda_context() -> None:
    text = (
        "import os\nfrom headway.machine.detection import detect_machine\n"
        "detect_machine(full=True)\n"
        "pids = [pid for gpu in detect_machine(full=True).gpus for pid in gpu.use.pids]\n"
        "assert os.getpid() not in pids"
    )
    execute([sys.executable, "-c", text], code=0)


def test_the_smoke_test_passes_on_all_gpus() -> None:
    done = execute([sys.executable, "-m", "headway", "test", "--device", "cuda"], code=0)
    assert "on cuda" in done.stdout


def watching() -> StepClock:
    clock = StepClock()
    clock.watch_device(torch.device("cuda", torch.cuda.current_device()))
    clock.end_step(1)
    clock.take(0, None)
    return clock


def test_the_work_of_a_step_takes_what_the_gpu_takes_and_is_not_waited_for() -> None:
    matrix = torch.rand(4096, 4096, device="cuda")
    matrix @ matrix  # loads cuBLAS
    clock = watching()
    began_at = time.perf_counter()
    for step in (2, 3, 4):
        clock.enter(FORWARD)
        for _ in range(50):
            matrix @ matrix
        clock.enter(DATA)
        torch.rand(8, device="cuda")
        clock.end_step(step)
    queued_s = time.perf_counter() - began_at
    torch.cuda.synchronize()
    clock.end_step(5)
    stats = clock.take(0, None)
    assert stats is not None
    assert stats.forward_s > 3 * queued_s
    assert stats.forward_s > 10 * stats.data_s


def test_a_step_in_a_graph_is_captured_and_replayed_as_without_the_clock() -> None:
    total = torch.zeros(1, device="cuda")
    clock = watching()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clock.enter(FORWARD)
        total += 1
        clock.end_step(2)
    for step in (3, 4, 5):
        graph.replay()
        clock.enter(FORWARD)
        clock.end_step(step)
    assert total.item() == 3
    assert clock.take(0, None) is not None
