"""Results of different sizes: pad_across_processes, broadcast, main_process_first."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, concatenate, recursively_apply

accelerator = Accelerator()
with accelerator.main_process_first():
    rows = torch.ones(accelerator.process_index + 2, 2) * (accelerator.process_index + 1)
padded = accelerator.pad_across_processes(rows, dim=0, pad_index=-1)
gathered = accelerator.gather(padded)
shared = broadcast(torch.full((2,), float(accelerator.process_index)))
doubled = recursively_apply(lambda one: one * 2, {"a": [shared, shared]})
joined = concatenate([{"a": shared}, {"a": shared + 1}])
found = {
    "gathered": gathered.tolist(),
    "doubled": [one.tolist() for one in doubled["a"]],
    "joined": joined["a"].tolist(),
    "maximum": accelerator.reduce(rows.max(), "max").item(),
}
accelerator.print(json.dumps(found))
