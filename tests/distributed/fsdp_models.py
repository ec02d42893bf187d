"""The models of the tests of sharded training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH = 17, 10  # which neither 3 nor 4 ranks divide


class Block(nn.Module):
    """Causal self-attention and a perceptron, each normalised first and added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.first(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x.add(self.narrow(F.gelu(self.wide(self.second(x)))))


class GPT(nn.Module):
    """A tiny GPT whose head is tied to its embedding."""

    def __init__(self, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("calls", torch.zeros(1))
        with torch.no_grad():
            self.token.weight.mul_(0.3)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each token from those before it."""
        return F.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class MLP(nn.Module):
    """Two layers of equal class and odd sizes, one frozen, and a third with the first's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh())
        self.layers[2].requires_grad_(False)
        self.again = nn.Linear(7, 5)
        self.again.weight = self.layers[0].weight  # type: ignore[assignment]

    def forward(self, batch: Tensor) -> Tensor:
        rows = batch[:, :7].float() / VOCABULARY
        x: Tensor = self.again(self.layers(rows))
        return (x - rows[:, :5]).pow(2).mean()
