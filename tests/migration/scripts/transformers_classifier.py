"""A model of transformers with its scheduler, as in Accelerate's nlp_example."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

accelerator = Accelerator()
set_seed(18)
config = BertConfig(
    vocab_size=30,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
rows = [{"input_ids": torch.randint(0, 30, (6,)), "labels": index % 2} for index in range(41)]
train = DataLoader(rows[:32], batch_size=4, shuffle=True)
valid = DataLoader(rows[32:], batch_size=4)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, len(train))
model, optimizer, train, valid, scheduler = accelerator.prepare(
    model, optimizer, train, valid, scheduler
)
losses, correct = [], []
for batch in train:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
model.eval()
for batch in valid:
    with torch.no_grad():
        logits = model(**batch).logits
    guesses, labels = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
    correct += (guesses == labels).tolist()
accelerator.print(json.dumps({"losses": losses, "correct": correct}))
