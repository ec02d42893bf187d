"""On a machine with CUDA GPUs: what is detected without torch is what torch finds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from headway.machine.detection import detect_machine

pytestmark = [
    pytest.mark.gpu,
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
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", text], env=environ, check=True, timeout=60)


def test_the_smoke_test_passes_on_all_gpus() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "headway", "test", "--device", "cuda"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on cuda" in done.stdout
