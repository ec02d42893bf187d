"""Ordinary scripts are followed: idioms, examples, pages, and those that save and go on."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.test_site import blocks
from tests.estimate.following import ROOT, Follow
from tests.waiting import IS_LONG

pytestmark = pytest.mark.processes

QUICK = 10  # every so many-th idiom is tried in the short form


class Idiom(NamedTuple):
    kind: str
    name: str
    text: str


def idioms() -> list[Idiom]:
    """Return the scripts: each cell of a file, after what all its cells begin with."""
    found = []
    for path in sorted(Path(__file__).with_name("idioms").glob("*.py")):
        prelude, *cells = re.split(r"^# %% ", path.read_text(), flags=re.MULTILINE)
        for cell in cells:
            name, _, body = cell.partition("\n")
            found.append(Idiom(path.stem, name, prelude + body))
    return found


IDIOMS = idioms()


def unfollowed(chosen: list[Idiom], follow: Follow) -> list[str]:
    """Return the names of those that are not followed to their end; each has to name the line."""
    found = []
    for number, idiom in enumerate(chosen):
        path = Path(f"{idiom.kind}_{number}.py")
        path.write_text(idiom.text)
        device = "cuda" if "on a GPU" in idiom.name or idiom.kind == "gpus" else "cpu"
        outcome = follow(path, device=device)
        if not outcome.failed_at:
            assert outcome.steps >= 2, (idiom.name, outcome)
            assert outcome.categories["parameters"] > 0, (idiom.name, outcome)
        else:
            assert f"{path}, line " in outcome.failed_at, (idiom.name, outcome)
            found.append(f"{idiom.kind}: {idiom.name}: {outcome.failed_at}")
    return found


@pytest.mark.timeout(900)
def test_idioms_of_each_kind_are_followed(follow: Follow) -> None:
    own = [idiom for idiom in IDIOMS if idiom.kind not in ("hard", "libraries")]
    named = [i for i in IDIOMS if i.name.startswith(("the accelerator of", "prepared workers"))]
    all_of_them = [idiom for idiom in IDIOMS if idiom.kind != "hard"]
    failed = unfollowed(all_of_them if IS_LONG else own[::QUICK] + named, follow)
    assert not [text for text in failed if not IS_LONG or "ModuleNotFoundError" not in text]


def test_a_script_that_cannot_be_followed_names_its_line(follow: Follow) -> None:
    hard = [idiom for idiom in IDIOMS if idiom.kind == "hard"]
    assert len(unfollowed(hard, follow)) == len(hard)


def test_each_example_and_each_script_of_the_pages_is_followed(follow: Follow) -> None:
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert len(scripts) >= 9
    pages = [(page, text) for page, text in blocks("python") if "optimizer.step()" in text]
    assert len(pages) >= 5
    for number, (page, text) in enumerate(pages):
        scripts.append(Path(f"{number}_{page}.py"))
        scripts[-1].write_text(text)
    for script in scripts[:: 1 if IS_LONG else 3]:
        outcome = follow(script)
        assert (outcome.failed_at, outcome.steps) == ("", 2), script


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
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        found = follow(script, device="cuda", world_size=ranks, local_world_size=ranks)
        assert (found.failed_at, found.steps) == ("", 2), (kind, found)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
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
