import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters())
data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
loader = DataLoader(data, batch_size=8, shuffle=True)

# %% headway in bf16, with evaluation first
from headway import Accelerator
from headway.utils import set_seed

set_seed(1)
accelerator = Accelerator(mixed_precision="bf16")
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
net.eval()
right = 0
for x, y in loader:
    with torch.no_grad():
        found, wanted = accelerator.gather_for_metrics((net(x).argmax(-1), y))
    right += (found == wanted).sum().item()
net.train()
for x, y in loader:
    accelerator.backward(F.cross_entropy(net(x), y))
    optimizer.step()
    optimizer.zero_grad()

# %% accelerate
from accelerate import Accelerator

accelerator = Accelerator()
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(net):
        accelerator.backward(F.cross_entropy(net(x), y))
        optimizer.step()
        optimizer.zero_grad()

# %% a small BERT of transformers, with a mask and checkpointing
from transformers import BertConfig, BertForSequenceClassification

config = BertConfig(
    num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=100
)
model = BertForSequenceClassification(config)
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens, mask = torch.randint(0, 100, (2, 16)), torch.ones(2, 16, dtype=torch.long)
    model(input_ids=tokens, attention_mask=mask, labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
