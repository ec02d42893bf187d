"""A worker of another framework, as Ray Train makes it: variables and process group are there.

python foreign_worker.py FOLDER, with the variables of a rank
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(rank)
    model = torch.nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=2)
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), data
    )
    samples: list[float] = []
    for (batch,) in data:
        samples += batch.flatten().tolist()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    seen = {
        "place": [accelerator.process_index, accelerator.num_processes],
        "samples": samples,
        "weights": [value.item() for value in model.state_dict().values()],
    }
    (Path(sys.argv[1]) / f"{world}-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
