"""Measure a classifier with torchmetrics over several ranks: every test sample counts once.

    python examples/metrics.py                                       one process
    headway launch --cpu --num-processes 2 examples/metrics.py       two ranks, the same figures

The 59 test samples do not divide by the ranks: `gather_for_metrics` brings the predictions of all
ranks to each of them, and leaves out those that were repeated to make the shares equal.
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
NUM_TEST_SAMPLES = 59  # a prime: no number of ranks shares it out evenly
EPOCHS = 20
SAMPLES_PER_STEP = 24  # of all ranks together


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(split_batches=True)  # batch_size is that of all ranks together
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

    Each rank updates them with the samples of all. torchmetrics would add up the ranks' states once
    more, and count each sample once for each rank: sync_on_compute=False keeps it from that.
    """
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(NUM_CLASSES, average="micro", sync_on_compute=False),
            "f1": MulticlassF1Score(NUM_CLASSES, average="macro", sync_on_compute=False),
            "confusion": MulticlassConfusionMatrix(NUM_CLASSES, sync_on_compute=False),
        }
    )


def load_datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: standardised features [N, 13], labels [N]."""
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
