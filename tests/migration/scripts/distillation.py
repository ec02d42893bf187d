"""A teacher that is not trained, a student that is."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(21)
teacher = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
student = torch.nn.Linear(5, 3)
optimizer = torch.optim.Adam(student.parameters(), lr=0.05)
loader = DataLoader(torch.randn(56, 5), batch_size=7, shuffle=True)
teacher = accelerator.prepare_model(teacher.requires_grad_(False), evaluation_mode=True).eval()
student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
losses = []
for _epoch in range(2):
    for batch in loader:
        with torch.no_grad():
            wanted = teacher(batch).softmax(-1)
        loss = torch.nn.functional.kl_div(
            student(batch).log_softmax(-1), wanted, reduction="batchmean"
        )
        accelerator.backward(loss)
        accelerator.clip_grad_value_(student.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
accelerator.print(json.dumps({"losses": losses}))
