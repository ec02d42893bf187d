"""Names of `accelerate.test_utils.training`: a line to fit, and the model that fits it."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from headway.compat.forwarding import forward

__getattr__, __dir__ = forward(__name__)


class RegressionDataset(Dataset[dict[str, np.float32]]):
    """Points near the line y = a x + b, each a mapping with `x` and `y`, both float32 scalars.

    Args:
        a: the slope.
        b: the value at 0.
        length: how many points.
        seed: of the points; None draws others each time.
    """

    def __init__(
        self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None
    ) -> None:
        numbers = np.random.default_rng(seed)
        self.length = length
        self.x = numbers.normal(size=length).astype(np.float32)
        noise = numbers.normal(scale=0.1, size=length).astype(np.float32)
        self.y = a * self.x + b + noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, np.float32]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(nn.Module):
    """The line y = a x + b; `a` and `b` are parameters of shape []."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(float(a)))
        self.b = nn.Parameter(torch.tensor(float(b)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `x`."""
        return x * self.a + self.b
