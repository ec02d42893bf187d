"""Evaluate a classifier with torchmetrics on several ranks; each test sample counts once.

    python examples/metrics.py                                       one process
    headway launch --cpu --num-processes 2 examples/metrics.py       two ranks, the same results

Several ranks cannot divide the 59 test samples evenly. `gather_for_metrics` returns the predictions
of all ranks on each rank, and drops the samples that were repeated to make the batches equal.
Needs the extra `examples`: pip install "headway[examples]".
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from headway import Accelerator
from headway.utils import set_seed

NUM_CLASSES = 3
NUM_TEST_SAMPLES = 59  # a prime, so several ranks cannot divide it evenly
EPOCHS = 20
SAMPLES_PER_STEP = 24  # over all ranks


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(split_batches=True)  # batch_size is the total over all ranks
    train_set, test_set = load_datasets()
    model = nn.Linear(train_set.tensors[0].shape[1], NUM_CLASSES)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.05),
        DataLoader(train_set, SAMPLES_PER_STEP, shuffle=True),
        DataLoader(test_set, batch_size=16),
    )
    for _ in range(EPOCHS):
        for features, labels in train_loader:
            accelerator.backward(F.cross_entropy(model(features), labels))
            optimizer.step()
            optimizer.zero_grad()

    metrics = build_metrics().to(accelerator.device)
    model.eval()
    with torch.no_grad():
        for features, labels in test_loader:
            predictions = model(features).argmax(dim=1)
            metrics.update(*accelerator.gather_for_metrics((predictions, labels)))
    results = metrics.compute()

    accelerator.print(f"number of ranks: {accelerator.num_processes}")
    accelerator.print(f"accuracy: {results['accuracy']:.4f}  F1: {results['f1']:.4f}")
    accelerator.print(f"test samples: {int(results['confusion'].sum())} of {NUM_TEST_SAMPLES}")
    accelerator.print(f"confusion: {results['confusion'].tolist()}")
    accelerator.end_training()


def build_metrics() -> MetricCollection:
    """Return the metrics of one rank.

    Each rank updates its metrics with the samples of all ranks. By default, torchmetrics would also
    sum the states over the ranks, which would count samples twice: sync_on_compute=False.
    """
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(NUM_CLASSES, average="micro", sync_on_compute=False),
            "f1": MulticlassF1Score(NUM_CLASSES, average="macro", sync_on_compute=False),
            "confusion": MulticlassConfusionMatrix(NUM_CLASSES, sync_on_compute=False),
        }
    )


def load_datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: standardized features [N, 13], labels [N]."""
    features, labels = load_wine(return_X_y=True)
    features = torch.tensor(features, dtype=torch.float32)
    labels = torch.tensor(labels)
    train, test = train_test_split(
        torch.arange(len(labels)), test_size=NUM_TEST_SAMPLES, random_state=0, stratify=labels
    )
    mean, std = features[train].mean(dim=0), features[train].std(dim=0)
    features = (features - mean) / std
    return TensorDataset(features[train], labels[train]), TensorDataset(
        features[test], labels[test]
    )


if __name__ == "__main__":
    main()
