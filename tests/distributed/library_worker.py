"""Trains by a library for two epochs, and can be stopped and started again at any time.

python library_worker.py trainer|lightning FOLDER, with what `main` reads

Each rank appends the number of each step that it has done to FOLDER/steps-RANK; at the end rank 0
writes the steps done and a checksum of the weights to FOLDER/done.json. Nothing of Headway is here.
"""
# mypy: ignore-errors

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch

RANK = int(os.environ.get("RANK", "0"))
NUM_SAMPLES = 56


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=TRAINED)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nap", type=float, default=0.1, help="seconds, after each step")
    parser.add_argument("--save-nap", type=float, default=0, help="seconds, amid each save")
    parser.add_argument("--workers", type=int, default=0, help="of the loaders")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / f"pid-{RANK}.tmp").write_text(str(os.getpid()))
    (given.folder / f"pid-{RANK}.tmp").rename(given.folder / f"pid-{RANK}")
    torch.manual_seed(0)
    if given.save_nap:
        slow_down_saves(given.save_nap)
    step, model = TRAINED[given.library](given)
    if RANK == 0:
        weights = b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())
        done = {"step": step, "weights": hashlib.sha256(weights).hexdigest()}
        (given.folder / "done.json").write_text(json.dumps(done))


def note_step(given: argparse.Namespace, step: int) -> None:
    with (given.folder / f"steps-{RANK}").open("a") as ledger:
        ledger.write(f"{step}\n")
    time.sleep(given.nap)


def slow_down_saves(nap: float) -> None:
    """Write what torch saves in two halves, with a pause between them."""
    save = torch.save

    def save_slowly(value, path, *args, **kwargs) -> None:
        save(value, path, *args, **kwargs)
        if isinstance(path, (str, Path)):
            size = os.path.getsize(path)
            whole = Path(path).read_bytes()
            os.truncate(path, size // 2)
            time.sleep(nap)
            Path(path).write_bytes(whole)

    torch.save = save_slowly


# ---------------------------------------------------------------- transformers


def settings(given: argparse.Namespace) -> dict:
    return {
        "output_dir": str(given.folder / "out"),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "save_steps": 5,
        "logging_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
    }


def noting_callback(given: argparse.Namespace):
    from transformers import TrainerCallback

    class Noting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            note_step(given, state.global_step)

    return Noting()


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0))


def train_by_trainer(given: argparse.Namespace):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 64, (NUM_SAMPLES, 12))]
    trainer = Trainer(
        model=gpt2(),
        args=TrainingArguments(**settings(given)),
        train_dataset=rows,
        eval_dataset=rows[:16],
        callbacks=[noting_callback(given)],
    )
    trainer.train()
    return trainer.state.global_step, trainer.model


# ---------------------------------------------------------------- Lightning


def train_by_lightning(given: argparse.Namespace):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
            )

        def training_step(self, batch, _):
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    class Noting(lightning.Callback):
        def on_train_batch_end(self, trainer, *_) -> None:
            note_step(given, trainer.global_step)

    lightning.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(NUM_SAMPLES, 4))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_epochs=2,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(given.folder / "out"),
        callbacks=[Noting(), ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)],
    )
    module = Module()
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True, num_workers=given.workers))
    return trainer.global_step, module


TRAINED = {
    "trainer": train_by_trainer,
    "lightning": train_by_lightning,
}

if __name__ == "__main__":
    main()
