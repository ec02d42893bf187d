"""A device kind, a precision and a strategy of another package, which this repository has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import launch, script

pytestmark = pytest.mark.distributed

FILES = {
    "toy_device-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy-device\nVersion: 1.0\n",
    "toy_device-1.0.dist-info/entry_points.txt": "[headway.devices]\ntoy = toy_device:Toy\n"
    "other = toy_device:Other\n",
    "toy_device.py": """
from headway.devices.kind import GpuKind

class Toy(GpuKind):
    name, label, maker, module = "toy", "TOY", "Toymaker", "toy_torch"
    backend, mask, recommended = "gloo", "TOY_VISIBLE", "no"
    lacking = ("fp16",)

    def found_in(self, files):
        fields = {"memory_bytes": 2**30, "capability": (0, 0)}
        return [{"name": self.label, "uuid": f"toy-{number}", **fields} for number in range(2)]

class Other(Toy):
    name, label = "other", "OTHER"
""",
    "toy_torch.py": """
import types
import torch

torch.utils.rename_privateuse1_backend("toy")
chosen = []
toy = types.ModuleType("torch.toy")
toy.is_available = toy.is_initialized = lambda: True
toy.device_count = lambda: 2
toy.current_device = lambda: chosen[-1].index
toy.set_device = chosen.append
toy.empty_cache = toy.synchronize = lambda *_: None
torch._register_device_module("toy", toy)
""",
}
OWN_PARTS = """
import torch
from headway.precision.precision import Precision
from headway.strategies.strategy import Strategy

class Doubled(Precision):
    name = "doubled"

    def backward(self, loss, **kwargs):
        super().backward(loss * 2, **kwargs)

class Summed(Strategy):
    name = "summed"

    def set_up(self, world, settings):
        super().set_up(world, settings)
        self.data_rank, self.data_size = world.ranks.rank, world.ranks.world_size

    def _share(self, model):
        def add_up(parameter):
            torch.distributed.all_reduce(parameter.grad)

        if self.data_size > 1:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(add_up)
        return model
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the packages in `FILES` importable in launched processes, as installed ones are."""
    for name, text in FILES.items():
        path = tmp_path / "outside" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "outside")  # `launch` passes it on


ON_TOYS = """
import torch
from headway import Accelerator
assert torch.toy.device_count() == 2  # the fork server has imported the module
accelerator = Accelerator(device_placement=False)
index = accelerator.process_index
assert str(accelerator.device) == f"toy:{index}" and torch.toy.current_device() == index
accelerator.print(accelerator.distributed_type, accelerator.reduce(torch.ones(1)))
accelerator.end_training()
"""


@pytest.mark.usefixtures("outside")
def test_the_ranks_train_on_a_device_kind_of_another_package() -> None:
    done = launch("-q", "--device", "toy", script(ON_TOYS), code=0)
    assert "MULTI_GPU tensor([2.])" in done.stdout


@pytest.mark.usefixtures("outside")
def test_a_device_kind_of_another_package_is_planned_for_and_named_in_messages() -> None:
    planned = launch("--dry-run", script(ON_TOYS))
    assert "2 GPUs (TOY)" in planned.stdout, planned.stderr
    refused = launch("--mixed-precision", "fp16", script(ON_TOYS))
    assert "the TOY supports only bf16" in refused.stderr
    Path("headway.yaml").write_text("device: other\n")  # on a machine with GPUs of another kind
    planned = launch("--dry-run", script(ON_TOYS))
    assert "2 processes on other" in planned.stdout, planned.stderr


WITH_OWN_PARTS = """
import torch
from headway import Accelerator
from own_parts import Doubled, Summed
accelerator = Accelerator(cpu=True, mixed_precision=Doubled(), strategy=Summed())
model = accelerator.prepare(torch.nn.Linear(1, 1))
accelerator.backward(model(torch.ones(1, 1)).sum())
accelerator.print(accelerator.mixed_precision, model.weight.grad.item())
accelerator.end_training()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_precision_and_a_strategy_of_another_package_are_obeyed(ranks: int) -> None:
    script(OWN_PARTS, "own_parts.py")
    done = launch("-q", "--cpu", "--num-processes", str(ranks), script(WITH_OWN_PARTS))
    assert f"doubled {2.0 * ranks}" in done.stdout, done.stderr
