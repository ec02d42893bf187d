"""`import accelerate`, with its version tested and its modules as attributes."""

import json

import accelerate
import accelerate.utils
import torch
from packaging import version

accelerator = accelerate.Accelerator()
accelerate.utils.set_seed(19)
has_hooks = version.parse(accelerate.__version__) >= version.parse("0.16.0")
mine = torch.arange(2.0) + 10 * accelerator.process_index
found = {
    "has_hooks": has_hooks,
    "gathered": accelerate.utils.gather(mine).tolist(),
    "mean": accelerate.utils.reduce(mine, reduction="mean").tolist(),
    "drawn": torch.rand(2).tolist(),
    "moved": accelerate.utils.send_to_device({"x": mine}, accelerator.device)["x"].shape[0],
}
accelerator.print(json.dumps(found))
