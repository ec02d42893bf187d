"""Train a small character-level GPT on the source code of Python's standard library.

    python examples/char_gpt.py                                      under a minute on two cores
    headway launch --cpu --num-processes 2 examples/char_gpt.py      two ranks, twice the batch
    headway launch --mixed-precision bf16 examples/char_gpt.py --size 124m --compile   a large GPU

`--size 124m` is the smallest GPT-2: 12 layers, 12 heads, width 768, context 1024 and a vocabulary
padded to 50,304 tokens, of which this text uses 128. The benchmarks use the same model.
"""

import argparse
import sysconfig
import time
from itertools import chain, repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.utils import set_seed

NUM_CHARACTERS = 128  # the text is ASCII, and a character's code is its token id
LOG_EVERY = 40
SIZES = {  # layers, heads, width, context, vocabulary
    "tiny": (2, 4, 64, 64, NUM_CHARACTERS),
    "small": (6, 6, 384, 256, NUM_CHARACTERS),
    "124m": (12, 12, 768, 1024, 50_304),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a character-level GPT on Python's source.")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="windows of text per rank")
    parser.add_argument("--sample-length", type=int, default=300, help="characters to generate")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    args = parser.parse_args()
    layers, heads, width, context, vocabulary = SIZES[args.size]

    set_seed(0)
    accelerator = Accelerator()
    text = read_standard_library()
    inputs = text[:-1].unfold(0, context, context)  # [windows, context]
    targets = text[1:].unfold(0, context, context)  # shifted by one character
    windows = TensorDataset(inputs, targets)
    loader = DataLoader(windows, args.batch_size, shuffle=True, drop_last=True)
    gpt = GPT(layers, heads, width, context, vocabulary)
    if args.compile:
        gpt.compile()
    optimizer = torch.optim.AdamW(gpt.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=0.5 / width, total_steps=args.steps, pct_start=0.1)
    model, optimizer, scheduler, loader = accelerator.prepare(gpt, optimizer, scheduler, loader)
    num_parameters = sum(parameter.numel() for parameter in gpt.parameters())
    accelerator.print(f"{num_parameters:,} parameters, {len(text):,} characters of text")

    step, losses, clock = 0, [], time.perf_counter()
    for inputs, targets in chain.from_iterable(repeat(loader)):
        with accelerator.accumulate(model):
            loss = model(inputs, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        step += accelerator.sync_gradients
        if accelerator.sync_gradients and (step in (1, args.steps) or step % LOG_EVERY == 0):
            mean_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
            num_tokens = len(losses) * inputs.numel() * accelerator.num_processes
            speed = num_tokens / (time.perf_counter() - clock)
            accelerator.print(f"step {step:4d}  loss {mean_loss:.4f}  {speed:9,.0f} tokens/s")
            losses, clock = [], time.perf_counter()
        if step == args.steps:
            break

    if accelerator.is_main_process:
        print("sample:\n" + gpt.sample("def ", args.sample_length))
    accelerator.end_training()


def read_standard_library() -> Tensor:
    """Return the top-level ASCII files of the standard library as token ids from 0 to 127."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(source for path in paths if (source := path.read_bytes()).isascii())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Block(nn.Module):
    """Causal self-attention and a two-layer MLP, each with pre-norm and a residual connection."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        # [batch, context, 3 * width] -> three times [batch, heads, context, width / heads]
        heads = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x.add(self.perceptron(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(heads, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)  # small, because it is tied to the output

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting targets from inputs, both [batch, context]."""
        return F.cross_entropy(self.logits(inputs).flatten(0, 1), targets.flatten())

    def logits(self, inputs: Tensor) -> Tensor:
        x = self.blocks(self.token(inputs) + self.position[: inputs.shape[1]])
        return F.linear(self.norm(x), self.token.weight)

    @torch.no_grad()
    def sample(self, prompt: str, num_characters: int) -> str:
        """Return the prompt followed by `num_characters` sampled characters."""
        tokens = torch.tensor([list(prompt.encode())], device=self.token.weight.device)
        for _ in range(num_characters):
            logits = self.logits(tokens[:, -len(self.position) :])[:, -1, :NUM_CHARACTERS]
            tokens = torch.cat([tokens, (logits / 0.8).softmax(-1).multinomial(1)], dim=1)
        return bytes(tokens[0].tolist()).decode("ascii")


if __name__ == "__main__":
    main()
