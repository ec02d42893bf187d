import json
import logging
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters())
x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))


def step():
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


# %% seeds
random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
torch.use_deterministic_algorithms(False)
for _ in range(3):
    step()

# %% saved in each step
for i in range(3):
    step()
    torch.save({"net": net.state_dict(), "step": i}, f"checkpoint_{i}.pt")

# %% a folder for results and a log
folder = Path("results")
folder.mkdir(parents=True, exist_ok=True)
logging.basicConfig(filename=folder / "log.txt", level=logging.INFO)
(folder / "config.json").write_text(json.dumps({"lr": 1e-3}))
for _ in range(3):
    logging.info("loss %s", step().item())
assert json.loads((folder / "config.json").read_text()) == {"lr": 1e-3}

# %% metrics as lines
with open("metrics.jsonl", "a") as file:
    for i in range(3):
        file.write(json.dumps({"step": i, "loss": step().item()}) + "\n")

# %% an old file is replaced
Path("latest.txt").write_text("old")
for _ in range(3):
    step()
    Path("latest.tmp").write_text("new")
    os.replace("latest.tmp", "latest.txt")

# %% safetensors
from safetensors.torch import save_file

for _ in range(3):
    step()
    save_file(net.state_dict(), "model.safetensors")

# %% tensorboard
from torch.utils.tensorboard import SummaryWriter

writer = SummaryWriter("runs")
for i in range(3):
    writer.add_scalar("loss", step().item(), i)

# %% the version of the code
import subprocess

try:
    version = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True)
except (OSError, subprocess.CalledProcessError):
    version = "unknown"
for _ in range(3):
    step()

# %% state dict of the model and back
weights = {name: value.clone() for name, value in net.state_dict().items()}
step()
net.load_state_dict(weights)
optimizer.load_state_dict(optimizer.state_dict())
for _ in range(2):
    step()

# %% arguments
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
for _ in range(parser.parse_args().epochs):
    step()


# %% a main function behind the usual guard
def main():
    for _ in range(3):
        step()


if __name__ == "__main__":
    main()
