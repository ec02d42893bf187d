"""Train a model whose parameters are sharded over the ranks.

    headway launch --cpu --num-processes 2 --strategy fsdp examples/fsdp.py
    headway launch --strategy fsdp --activation-checkpointing examples/fsdp.py       on several GPUs
    python examples/fsdp.py                                       one process, nothing is sharded

The same script trains in one process. It creates the model without data, initializes it unit by
unit, saves a sharded checkpoint, resumes from it with a new model, and exports safetensors files.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.utils import set_seed

LENGTH, VOCABULARY = 16, 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a sharded model.")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2, help="before and after the checkpoint")
    parser.add_argument("--output", default="fsdp-model", help="folder for the weights")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(forward_methods=["predict"])
    model, optimizer, loader = prepare(accelerator, args)
    accelerator.print(f"{num_local_elements(model):,} of {args.total:,} parameters on this rank")

    for _ in range(args.epochs):
        loss = train(accelerator, model, optimizer, loader)
    accelerator.print(f"loss {loss:.4f}, before the checkpoint")
    accelerator.save_state("fsdp-checkpoint")
    accelerator.free_memory()

    model, optimizer, loader = prepare(accelerator, args)
    accelerator.load_state("fsdp-checkpoint")
    for _ in range(args.epochs):
        loss = train(accelerator, model, optimizer, loader)
    accelerator.print(f"loss {loss:.4f}, resumed from the checkpoint")

    inner = accelerator.unwrap_model(model)
    assert isinstance(inner, Model)
    with torch.inference_mode():
        predicted = inner.predict(sequences()[:1].to(accelerator.device))
    accelerator.print("predicted:", *predicted[0].tolist())
    accelerator.save_model(model, args.output, max_shard_size="100KB")
    accelerator.end_training()


def prepare(
    accelerator: Accelerator, args: argparse.Namespace
) -> tuple[nn.Module, torch.optim.Optimizer, "DataLoader[tuple[Tensor, ...]]"]:
    with accelerator.empty_init():  # allocates no memory; prepare() shards the weights
        model = Model(args.width, args.layers)
    args.total = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(sequences()), batch_size=32, shuffle=True)
    prepared: tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[Tensor, ...]]]
    prepared = accelerator.prepare(model, optimizer, loader)
    return prepared


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: "DataLoader[tuple[Tensor, ...]]",
) -> float:
    """Train for one epoch and return the mean loss of the last batch over all ranks."""
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return float(accelerator.reduce(loss.detach(), "mean"))


def num_local_elements(model: nn.Module) -> int:
    """Return the number of parameter elements on this rank."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return sum(part.numel() for part in parts)


def sequences() -> Tensor:
    """Return sequences of shape [512, LENGTH] that count up by 1, 2 or 3."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(VOCABULARY, (512, 1), generator=generator)
    step = torch.randint(1, 4, (512, 1), generator=generator)
    return (start + step * torch.arange(LENGTH)) % VOCABULARY


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(width), nn.GRU(width, width, batch_first=True)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))[0]
        return x.add(self.perceptron(x))


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])  # the units to shard
        self.head = nn.Linear(width, VOCABULARY)

    def logits(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each token from the previous ones."""
        return F.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def predict(self, tokens: Tensor) -> Tensor:
        """Return the next token for each of `tokens`; `forward_methods` names this method."""
        return self.logits(tokens).argmax(-1)


if __name__ == "__main__":
    main()
