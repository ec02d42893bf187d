"""A language model whose accumulated loss is the mean over tokens, as transformers does it."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

set_seed(1)
accelerator = Accelerator(gradient_accumulation_steps=2)
texts = [torch.randint(1, 20, (4 + index % 7,)) for index in range(32)]


def collate(rows):
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100),
    }


model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Linear(16, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _epoch in range(2):
    batches = iter(loader)
    for _step in range(len(loader) // 2):
        group = [next(batches) for _ in range(2)]
        tokens = sum((one["labels"] != -100).sum() for one in group)
        tokens = accelerator.gather(tokens).sum().item()
        total = 0.0
        for index, batch in enumerate(group):
            context = accelerator.no_sync(model) if index == 0 else torch.enable_grad()
            with context:
                logits = model(batch["input_ids"])
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
                )
                loss = loss / tokens * accelerator.num_processes
                total += accelerator.reduce(loss.detach(), "mean").item()
                accelerator.backward(loss * accelerator.gradient_accumulation_steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
accelerator.print(
    json.dumps({"losses": losses, "perplexity": float(torch.tensor(losses[-1]).exp())})
)
