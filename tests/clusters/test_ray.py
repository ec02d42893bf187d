"""A script with an Accelerator runs unchanged in the workers of Ray Train, whose group it finds."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.distributed.launching import environment, execute, script

pytest.importorskip("ray.train")
pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(900)]

NOT_STARTED = 77
TRAIN = (
    f"NOT_STARTED = {NOT_STARTED}"
    + """
import json, sys, traceback
import ray, torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

def train(config):
    from headway import Accelerator
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    samples = TensorDataset(torch.arange(16).float().unsqueeze(1))
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(samples, 2, shuffle=True)
    )
    seen = []
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(batch[:, 0]).tolist()
    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach().reshape(1))
    if accelerator.is_main_process:
        with open(config["result"], "w") as file:
            json.dump({"seen": sorted(seen), "weights": weights.tolist()}, file)
    ray.train.report({"ranks": accelerator.num_processes})

try:
    ray.init()
except Exception:  # it gives itself 30 s, which may be too little on a busy machine
    traceback.print_exc()
    sys.exit(NOT_STARTED)
folder = sys.argv[1]
TorchTrainer(
    train,
    train_loop_config={"result": f"{folder}/result.json"},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=folder),
).fit()
"""
)


def test_an_accelerator_in_workers_of_ray_train_shares_out_the_samples_and_trains_one_model(
    tmp_path: Path,
) -> None:
    usual = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(prefix="hwr-", ignore_cleanup_errors=True) as folder:
        environ = environment(**usual, RAY_TMPDIR=folder)  # paths of sockets are short
        done = execute([sys.executable, script(TRAIN), str(tmp_path)], environ, timeout_s=800)
    if done.returncode == NOT_STARTED:
        pytest.skip(f"Ray does not start here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["seen"] == [float(i) for i in range(16)]
    first, second = result["weights"]
    assert first == second
