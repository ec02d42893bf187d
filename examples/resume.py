"""Train on handwritten digits. Stop or kill the script at any time; run it again to resume.

It can resume on another number of ranks: neither the seed nor the global batch size changes.

    python examples/resume.py                                     one process
    headway launch --cpu --num-processes 2 examples/resume.py     two ranks on the CPU
    headway launch --cpu --time-limit 5s examples/resume.py       exits after 5 s with exit code 75

Two lines enable this: `run = accelerator.resume()` before the loop, and `accelerator.checkpoint()`
at its end. After Ctrl-C, the run saves and exits. After SIGKILL, it resumes from the last save.
Delete the project folder to start again. Needs the extra `demo`: pip install "headway[demo]".
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator


def main() -> None:
    args = parse_args()
    accelerator = Accelerator(project_dir=args.project, seed=0, global_batch_size=60)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(data, shuffle=True),
    )

    run = accelerator.resume()  # the newest checkpoint of the project folder, or a fresh start
    for epoch in range(run.epoch, args.epochs):
        for inputs, labels in loader:  # resumes at the first sample that no rank has seen
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(args.nap)
            accelerator.checkpoint(every=args.every)  # saves; exits when the job is preempted
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")

    weights = torch.cat([p.flatten() for p in accelerator.unwrap_model(model).parameters()])
    accelerator.print(f"trained from step {run.step} on; the weights' sum is {weights.sum():.6f}")
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train; interrupt at any time.")
    parser.add_argument("--project", type=Path, default=Path("runs/resume"), help="folder")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--every", default="50", help="steps, or a duration such as 10m")
    parser.add_argument("--nap", type=float, default=0.0, help="seconds to sleep in each step")
    args = parser.parse_args()
    args.every = int(args.every) if args.every.isdecimal() else args.every
    return args


if __name__ == "__main__":
    main()
