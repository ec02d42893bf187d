"""Scripts that save, and that go on from checkpoints, are followed; nothing is written."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.estimate.following import Follow

pytestmark = pytest.mark.processes

MODEL = """
import os
import torch
from torch import nn

os.chdir(os.path.dirname(__file__))
device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters())


def step(backward=torch.Tensor.backward):
    backward(net(torch.randn(8, 16, device=next(net.parameters()).device)).sum())
    optimizer.step()
    optimizer.zero_grad()
"""
SAVED = """
from headway import Accelerator
from safetensors.torch import save_file

step()
torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, "all.pt")
save_file(net.state_dict(), "net.safetensors")
accelerator = Accelerator(cpu=True, project_dir="project")
net, optimizer = accelerator.prepare(net, optimizer)
accelerator.checkpoint()
accelerator.end_training()
"""
GOES_ON = {
    "headway": """
from headway import Accelerator
accelerator = Accelerator(project_dir="project")
net, optimizer = accelerator.prepare(net, optimizer)
assert accelerator.resume().step == 0  # noted
step(accelerator.backward)
accelerator.checkpoint(every=1)
accelerator.load_state("project/checkpoints/step_00000000")  # noted
accelerator.save_state("state", wait=False)
accelerator.save_model(net, "model")
accelerator.save(net.state_dict(), "net.safetensors", safe_serialization=True)
step(accelerator.backward)
""",
    "torch": """
state = torch.load("all.pt", map_location=device)
net.to(device)
net.load_state_dict(state["net"])
optimizer.load_state_dict(state["optimizer"])
step()
torch.save(net.state_dict(), "all.tmp")
os.replace("all.tmp", "all.pt")
step()
""",
    "torch.distributed.checkpoint": """
import torch.distributed.checkpoint as dcp
state = {"net": net.state_dict()}
dcp.load(state, checkpoint_id="dcp")  # noted
net.load_state_dict(state["net"])
step()
dcp.async_save(state, checkpoint_id="new").result()
step()
""",
    "safetensors": """
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model
net.load_state_dict(load_file("net.safetensors"))
with safe_open("net.safetensors", framework="pt") as file:
    assert file.get_slice("0.weight")[:2].shape == (2, 16)
    assert net[0].bias.shape == file.get_tensor("0.bias").shape
load_model(net, "net.safetensors")
step()
save_model(net, "net.safetensors")
step()
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a training was saved in all ways."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("saved")
    (folder / "save.py").write_text(MODEL + SAVED)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path(str(folder / "save.py"))
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_scripts_that_go_on_are_followed_and_nothing_is_written(
    ranks: int, folder: Path, follow: Follow
) -> None:
    for kind, text in GOES_ON.items():
        script = folder / "script.py"
        script.write_text(MODEL + text)
        before = {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}
        found = follow(script, device="cuda", world_size=ranks, local_world_size=ranks)
        assert (found.failed_at, found.steps) == ("", 2), (kind, found)
        assert {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()} == before
        for number, line in enumerate(script.read_text().splitlines(), 1):
            is_noted = any(f"line {number})" in note for note in found.notes)
            assert is_noted or "# noted" not in line, (kind, found)


PRETRAINED = """
import os, torch
from transformers import AutoModelForCausalLM
os.chdir(os.path.dirname(__file__))
net = AutoModelForCausalLM.from_pretrained("pretrained", dtype=torch.bfloat16, device_map="cuda")
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    tokens = torch.randint(0, 100, (2, 32), device=net.device)
    net(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    net.save_pretrained("trained")
"""


@pytest.mark.long
def test_a_pretrained_model_is_read_from_its_folder_and_saved_in_each_step(follow: Follow) -> None:
    pytest.importorskip("accelerate")  # which device_map needs
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)
    config.save_pretrained("pretrained")
    weights = transformers.GPT2LMHeadModel(config).state_dict()
    del weights["lm_head.weight"]  # tied
    save_file(weights, Path("pretrained") / "model.safetensors", {"format": "pt"})
    Path("script.py").write_text(PRETRAINED)
    found = follow("script.py", device="cuda", device_bytes=2**34)
    assert (found.failed_at, found.steps) == ("", 2), found
    assert found.categories["parameters"] > 0
