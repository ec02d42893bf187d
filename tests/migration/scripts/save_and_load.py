"""Weights saved by save_model and by save, and loaded again before prepare()."""

import json
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from safetensors.torch import load_file
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(13)
[folder] = broadcast_object_list([tempfile.mkdtemp()])
model = torch.nn.Sequential(torch.nn.Linear(3, 200), torch.nn.Linear(200, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(16, 3), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
accelerator.save_model(model, folder, max_shard_size="1KB")
accelerator.save(accelerator.get_state_dict(model), Path(folder) / "state.pt")
accelerator.wait_for_everyone()
names = sorted(one.name for one in Path(folder).iterdir())
loaded = torch.load(Path(folder) / "state.pt", weights_only=True)
for one in Path(folder).glob("*.safetensors"):
    assert all(torch.equal(loaded[name], value) for name, value in load_file(one).items())
sums = {name: one.sum().item() for name, one in loaded.items()}
accelerator.print(json.dumps({"files": names, "weights": sums}))
