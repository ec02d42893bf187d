"""`replace_accelerate()`: what imports accelerate gets Headway's runtime."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import execute, executed, launch, script

HIDING = """
import importlib.util
importlib.util.find_spec = lambda name: None
"""
"""As if no Accelerate were installed."""
IMPORTED = "import sys\nsys.modules['accelerate'] = sys  # which takes no seconds\n"

LOOKING = """
import json, sys, warnings
from importlib import import_module
import headway

headway.replace_accelerate()
headway.replace_accelerate()  # again is no error
facts = {}
from accelerate import Accelerator, dispatch_model
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, MegatronLMPlugin, gather, set_seed, tqdm
from accelerate.utils.operations import GatheredParameters, send_to_device
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
import accelerate, accelerate.utils.fsdp_utils as fsdp_utils, torch

same = import_module("headway.compat")
facts["ours"] = [
    one is other
    for one, other in (
        (Accelerator, same.Accelerator),
        (accelerate.state.PartialState, headway.PartialState),
        (AcceleratorState, same.state.AcceleratorState),
        (GradientState, same.state.GradientState),
        (accelerate.data_loader.DataLoaderShard, same.data_loader.DataLoaderShard),
        (accelerate.optimizer.AcceleratedOptimizer, same.optimizer.AcceleratedOptimizer),
        (accelerate.scheduler.AcceleratedScheduler, same.scheduler.AcceleratedScheduler),
        (accelerate.tracking.GeneralTracker, same.tracking.GeneralTracker),
        (gather, same.utils.gather),
        (send_to_device, same.utils.send_to_device),
        (set_seed, same.utils.set_seed),
        (tqdm, same.utils.tqdm),
        (fsdp_utils.save_fsdp_model, same.utils.fsdp_utils.save_fsdp_model),
        (accelerate.utils.save_fsdp_optimizer, same.utils.fsdp_utils.save_fsdp_optimizer),
    )
]

def said(call):
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing"

model = torch.nn.Linear(2, 1)
facts["refused"] = said(GatheredParameters)
facts["isinstance"] = isinstance(model, GatheredParameters)
facts["dispatch"] = said(lambda: dispatch_model(model, {"": "cpu"}))
facts["hook"] = said(lambda: add_hook_to_module(model, AlignDevicesHook()))
facts["unknown"] = [said(lambda: accelerate.no_such_name), hasattr(accelerate.state, "nothing")]
facts["runtimes"] = sorted(
    name
    for name, module in sys.modules.items()
    if name.startswith("accelerate.") and (getattr(module, "__file__", None) or "").endswith(
        ("accelerator.py", "state.py", "operations.py", "data_loader.py", "optimizer.py")
    )
)
print(json.dumps(facts))
"""


def facts_of(source: str) -> dict[str, Any]:
    Path("looking.py").write_text(source)
    ended = execute([sys.executable, "looking.py"], code=0)
    facts: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return facts


@pytest.mark.processes
@pytest.mark.skipif(find_spec("accelerate") is None, reason="Accelerate is not installed")
def test_device_maps_and_hooks_stay_those_of_the_installed_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = facts_of(LOOKING)
    assert all(facts["ours"]), facts["ours"]
    assert facts["dispatch"] == facts["hook"] == "nothing"
    assert "has no counterpart in Headway" in facts["refused"]
    assert "without --replace-accelerate" in facts["refused"]
    assert not facts["isinstance"]
    assert facts["unknown"] == ["module 'accelerate' has no attribute 'no_such_name'", False]
    assert not facts["runtimes"], "no second runtime is executed"


@pytest.mark.processes
@pytest.mark.skipif(find_spec("accelerate") is None, reason="Accelerate is not installed")
@pytest.mark.parametrize(
    ("before", "what", "fix"),
    [
        (HIDING, "accelerate is not installed", "pip install accelerate"),
        (IMPORTED, "is already imported", "headway launch --replace-accelerate"),
    ],
)
def test_accelerate_that_cannot_be_replaced_is_refused(before: str, what: str, fix: str) -> None:
    ended = execute([sys.executable, "-c", f"{before}import headway\nheadway.replace_accelerate()"])
    assert what in ended.stderr
    assert fix in ended.stderr


@pytest.mark.processes
@pytest.mark.skipif(find_spec("accelerate") is None, reason="Accelerate is not installed")
def test_a_single_process_gets_it_before_its_first_line_and_pays_nothing_without_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = script(
        "import sys\n"
        "print('torch' in sys.modules, 'headway.compat' in sys.modules)\n"
        "if 'headway.compat' in sys.modules:\n"
        "    import accelerate\n    print(accelerate.Accelerator.__module__)\n"
    )
    with executed():
        ended, usual = launch("--replace-accelerate", name), launch(name)
    assert ended.stdout.split() == ["False", "True", "headway.compat.accelerator"], ended.stderr
    assert usual.stdout.split() == ["False", "False"]
    ended = launch("--replace-accelerate", "--no-python", "true")
    assert "replace_accelerate has no effect with --no-python" in ended.stderr


TRAINING = """
import json, os, sys
import torch
from accelerate.state import AcceleratorState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, TrainerCallback

folder = sys.argv[1]
config = GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=32, n_positions=8, resid_pdrop=0,
                    embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=1)
tokens = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": one, "labels": one} for one in tokens]

class Held(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **_):
        self.parameters = [0, 0]
        for one in model.parameters():
            own = one.to_local() if hasattr(one, "to_local") else one
            self.parameters = [self.parameters[0] + own.numel(), self.parameters[1] + one.numel()]

def train(resumed_from=None):
    torch.manual_seed(1)
    held = Held()
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, max_steps=4, logging_steps=1, save_steps=2,
        report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=0.01, seed=1,
        gradient_accumulation_steps=2,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, eval_dataset=data[:3],
                      callbacks=[held])
    trainer.train(resume_from_checkpoint=resumed_from)
    trainer.save_model(f"{folder}/last")
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return {"losses": [*losses, trainer.evaluate()["eval_loss"]], "held": held.parameters,
            "runtime": type(trainer.accelerator).__module__}

whole, resumed = train(), train(f"{folder}/checkpoint-2")
os.environ["HEADWAY_RUN"] = os.environ["HEADWAY_RUN"].replace("fsdp", "ddp")
AcceleratorState._reset_state()
print("seen", json.dumps([whole, resumed, train()]), flush=True)
"""


@pytest.mark.distributed
@pytest.mark.usefixtures("warm_pythons")
def test_the_trainer_shards_models_by_a_flag_with_the_losses_of_ddp_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    monkeypatch.chdir(tmp_path)
    name = script(TRAINING)
    words = ["--cpu", "--num-processes", "2", "--replace-accelerate", "--strategy", "fsdp"]
    ended = launch(*words, name, "trained", code=0)
    lines = [line for line in ended.stdout.splitlines() if "] seen " in line]
    assert len(lines) == 2, ended.stdout
    for sharded, resumed, copied in (json.loads(line.partition(" seen ")[2]) for line in lines):
        assert sharded["runtime"] == "headway.compat.accelerator"
        assert resumed["losses"] == pytest.approx(sharded["losses"], abs=1e-6)
        assert sharded["losses"] == pytest.approx(copied["losses"], abs=1e-6)
        own, every = sharded["held"]
        assert own * 2 == every == copied["held"][0]
    assert Path("trained/last/model.safetensors").exists(), "whole, for from_pretrained"
