"""bf16: the model under autocast, the loss in fp32, autocast for what is outside of it."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
set_seed(11)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, types = [], set()
for _epoch in range(2):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            logits = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits, labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        with accelerator.autocast():
            types.add(str((inputs @ inputs.T).dtype))
        types.add(str(logits.dtype))
accelerator.print(json.dumps({"losses": losses, "types": sorted(types)}))
