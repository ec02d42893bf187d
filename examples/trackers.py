"""Log the mean loss over all ranks to a file or a tracking service.

    python examples/trackers.py                                      a file below runs/
    python examples/trackers.py --tracker tensorboard                needs tensorboard
    headway launch --cpu --num-processes 2 examples/trackers.py      two ranks, one log

Trackers exist only on the main process, and `accelerator.log` does nothing on the other ranks, so
the script first reduces the loss over the ranks.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.utils import set_seed

EPOCHS = 4
LEARNING_RATE = 0.1
LOG_EVERY = 5  # optimizer steps


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and log the loss.")
    parser.add_argument("--tracker", default="jsonl", help="jsonl, tensorboard, wandb, mlflow, ...")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="folder for the logs")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(
        log_with=args.tracker, project_dir=str(args.folder), split_batches=True
    )
    config = {"epochs": EPOCHS, "learning_rate": LEARNING_RATE}
    accelerator.init_trackers("regression", config=config)

    inputs = torch.randn(640, 8)
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        DataLoader(dataset, batch_size=64, shuffle=True),
    )
    step = 0
    for epoch in range(EPOCHS):
        for features, targets in loader:
            loss = F.mse_loss(model(features), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % LOG_EVERY == 0:
                mean_loss = accelerator.reduce(loss.detach(), "mean").item()
                accelerator.log({"loss": mean_loss, "epoch": epoch}, step=step)
    accelerator.print(f"{step} steps, last loss {mean_loss:.4f}")
    accelerator.end_training()  # flushes and closes the trackers


if __name__ == "__main__":
    main()
