"""Train a small CNN on scikit-learn's handwritten digits: 1,797 real 8x8 images, no download.

    python examples/digits.py                                           one process
    headway launch --cpu --num-processes 2 examples/digits.py           two ranks on the CPU
    headway launch examples/digits.py --epochs 5 --output five.pt       all devices of this machine
    torchrun --nproc-per-node 2 examples/digits.py                      any other launcher

Each optimizer step uses the same number of samples on any number of ranks, so the accuracy is
about the same. Needs the extra `demo`: pip install "headway[demo]".
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from headway import Accelerator
from headway.utils import set_seed

ACCUMULATION_STEPS = 2
SAMPLES_PER_STEP = 128  # over all ranks and micro-batches
PEAK_LEARNING_RATE = 1e-2
NUM_TEST_SAMPLES = 449  # a prime, so several ranks cannot divide it evenly


def main() -> None:
    args = parse_args()
    set_seed(args.seed)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION_STEPS)

    micro_batch_size = max(1, SAMPLES_PER_STEP // (ACCUMULATION_STEPS * accelerator.num_processes))
    train_set, test_set = load_datasets()
    train_loader, test_loader = accelerator.prepare(
        DataLoader(train_set, micro_batch_size, shuffle=True), DataLoader(test_set, batch_size=64)
    )
    # the length of a prepared loader is its number of batches on this rank
    steps_per_epoch = math.ceil(len(train_loader) / ACCUMULATION_STEPS)

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LEARNING_RATE, total_steps=args.epochs * steps_per_epoch
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    progress = tqdm(
        total=args.epochs * steps_per_epoch,
        desc="training",
        unit="step",
        disable=not accelerator.is_main_process,
    )
    for _ in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress.update()
    progress.close()

    num_correct, num_samples = evaluate(accelerator, model, test_loader)
    if accelerator.is_main_process:
        print(f"number of ranks: {accelerator.num_processes}")
        print(f"test accuracy: {num_correct / num_samples:.4f} ({num_correct} of {num_samples})")
        torch.save(accelerator.unwrap_model(model).state_dict(), args.output)
        print(f"model saved to: {args.output}")
    accelerator.end_training()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("digits.pt"), help="weights file")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: images [N, 1, 8, 8] from 0 to 1, labels [N]."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        torch.arange(len(labels)), test_size=NUM_TEST_SAMPLES, random_state=0, stratify=labels
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 10),
    )


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> tuple[int, int]:
    """Return the number of correct test samples and of all test samples, over all ranks."""
    model.eval()
    num_correct = num_samples = 0
    for images, labels in loader:
        predictions = model(images).argmax(dim=1)
        # drops the samples that were repeated to make the ranks' batches equal in size
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        num_correct += int((predictions == labels).sum())
        num_samples += len(labels)
    return num_correct, num_samples


if __name__ == "__main__":
    main()
