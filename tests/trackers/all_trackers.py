"""Trains with all trackers that are installed, offline, and prints what each has kept.

Started by test_adapters.py: python all_trackers.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway import Accelerator
from headway.trackers.choice import get_available_trackers

CONFIG = {
    "lr": 0.001,
    "optimizer": "sgd",
    "layers": [1, 2],
    "path": Path("x"),
    "none": None,
    "nested": {"a": 1},
}
VALUES = {
    "loss": torch.tensor(0.5),
    "accuracy": np.float32(0.25),
    "train": {"lr": torch.tensor(1.5)},
    "note": "hello",
}
LONG = "x" * 10_000
QUIET = {"embed": False, "auto_log_cpu": False}


def main(folder: Path) -> None:
    names = [name for name in get_available_trackers() if name != "jsonl"]
    accelerator = Accelerator(cpu=True, log_with=names, project_dir=folder)
    accelerator.init_trackers("project", {**CONFIG, "long": LONG}, init_kwargs={"trackio": QUIET})
    for step in (3, 4):
        accelerator.log(VALUES, step=step)
    accelerator.log({"list": [1, 2]}, step=5)
    accelerator.log({"unnumbered": 1.0})
    seen = {name: READERS[name](accelerator.get_tracker(name)) for name in names if name in READERS}
    accelerator.end_training()
    seen |= {name: AFTER[name](seen.get(name), folder) for name in names if name in AFTER}
    print("SEEN", json.dumps(seen, default=dict))


def read_tensorboard(tracker: Any) -> None:
    images = np.zeros((2, 3, 4, 4), dtype=np.uint8)
    tracker.writer.add_images("images", images, 3)


def read_wandb(tracker: Any) -> dict[str, Any]:
    return {"config": dict(tracker.run.config), "summary": dict(tracker.run.summary)}


def read_mlflow(tracker: Any) -> Any:
    return tracker.tracker.info.run_id


def mlflow_afterwards(run_id: Any, folder: Path) -> dict[str, Any]:
    import mlflow

    run = mlflow.get_run(run_id)
    return {
        "params": run.data.params,
        "metrics": run.data.metrics,
        "status": run.info.status,
        "steps": [point.step for point in mlflow.MlflowClient().get_metric_history(run_id, "loss")],
    }


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}
AFTER = {"mlflow": mlflow_afterwards}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
