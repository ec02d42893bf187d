"""Train on a stream, an IterableDataset without a length, that is divided among the ranks.

    python examples/iterable.py                                      one process
    headway launch --cpu --num-processes 2 examples/iterable.py      two ranks

Every rank reads the whole stream and keeps its part of each global batch. The stream must
therefore yield the same samples on all ranks: it uses a separate generator, seeded by the epoch.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from headway import Accelerator
from headway.utils import set_seed

CONTEXT = 32  # input values
TEST_SAMPLES = 101  # a prime, so several ranks cannot divide it evenly
EPOCHS = 3


class Waves(IterableDataset[tuple[Tensor, Tensor]]):
    """Noisy sine waves of random frequency and phase: CONTEXT values and the next value.

    Args:
        num_samples: the number of samples in an epoch.
        seed: the seed of the first epoch.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw different samples; set_epoch() of the prepared loader calls this method."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(self.seed + self.epoch)
        for _ in range(self.num_samples):
            frequency, phase = torch.rand(2, generator=random)
            times = torch.arange(CONTEXT + 1) * (0.2 + frequency)
            wave = torch.sin(times + 2 * math.pi * phase)
            noise = 0.05 * torch.randn(CONTEXT, generator=random)
            yield wave[:-1] + noise, wave[-1:]


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(split_batches=True)  # batch_size is the total over all ranks
    model = nn.Sequential(nn.Linear(CONTEXT, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(Waves(1_500, seed=1), batch_size=32),
        DataLoader(Waves(TEST_SAMPLES, seed=1_000), batch_size=32),
    )
    for epoch in range(EPOCHS):
        model.train()
        train_loader.set_epoch(epoch)
        for inputs, targets in train_loader:
            accelerator.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        errors = []
        with torch.no_grad():
            for inputs, targets in test_loader:
                error = (model(inputs) - targets).square()
                errors.append(accelerator.gather_for_metrics(error))
        squares = torch.cat(errors)
        accelerator.print(
            f"epoch {epoch}: error {squares.mean().sqrt():.4f} on {len(squares)} test samples"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
