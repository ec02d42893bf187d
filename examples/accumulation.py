"""Train with gradient accumulation: the same results with batches that fit into memory.

    python examples/accumulation.py                                     64 samples at once
    python examples/accumulation.py --micro-batch-size 8                8 micro-batches of 8
    headway launch --cpu --num-processes 2 examples/accumulation.py --micro-batch-size 8

Each optimizer step uses 64 samples, for any number of ranks and any micro-batch size, so the final
mean loss is the same up to rounding. Needs the extra `examples`: pip install "headway[examples]".
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.utils import set_seed

SAMPLES_PER_STEP = 64  # over all ranks and micro-batches
EPOCHS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with gradient accumulation.")
    parser.add_argument("--micro-batch-size", type=int, help="samples per micro-batch on each rank")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator()
    samples_per_rank = SAMPLES_PER_STEP // accelerator.num_processes
    micro_batch_size = args.micro_batch_size or samples_per_rank
    accelerator.gradient_accumulation_steps = samples_per_rank // micro_batch_size

    dataset = load_dataset()
    # drop_last keeps all micro-batches the same size, because each has the same weight
    loader = DataLoader(dataset, micro_batch_size, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(dataset.tensors[0].shape[1], 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    # the scheduler steps once per optimizer step, for any number of micro-batches
    scheduler = LinearLR(optimizer, 1.0, 0.1, EPOCHS * (len(dataset) // SAMPLES_PER_STEP))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    num_steps = 0
    for _ in range(EPOCHS):
        for features, target in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(features), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:  # the last micro-batch of a step
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    num_steps += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    features, target = (tensor.to(accelerator.device) for tensor in dataset.tensors)
    with torch.no_grad():
        loss = F.mse_loss(model(features), target)
    accelerator.print(
        f"{accelerator.num_processes} ranks x {accelerator.gradient_accumulation_steps} "
        f"micro-batches of {micro_batch_size}: {num_steps} optimizer steps, "
        f"learning rate {scheduler.get_last_lr()[0]:.4f}"
    )
    accelerator.print(f"mean loss: {loss.item():.6f}")
    accelerator.end_training()


def load_dataset() -> TensorDataset:
    """Return scikit-learn's diabetes data: features [384, 10], standardized target [384, 1]."""
    features, target = load_diabetes(return_X_y=True)
    count = len(target) // SAMPLES_PER_STEP * SAMPLES_PER_STEP  # a multiple of SAMPLES_PER_STEP
    features = torch.tensor(features[:count], dtype=torch.float32) * features.shape[0] ** 0.5
    target = torch.tensor(target[:count], dtype=torch.float32).unsqueeze(1)
    return TensorDataset(features, (target - target.mean()) / target.std())


if __name__ == "__main__":
    main()
