"""What `headway estimate` says that a script takes, against what it takes, beside two formulas.

    python benchmarks/estimate.py                       # some minutes and 5 GB of memory
    python benchmarks/estimate.py --size small          # the same cases in small
    python benchmarks/estimate.py --only mlp --json result.json

The truth of one process is the peak of torch's own allocator over two real steps on this CPU, by
torch.profiler's allocation events: the workspaces of kernels count. That of two ranks, where the
profiler misses what other threads free, is the peak of live storages of rank 0. The formulas are
that of `accelerate estimate-memory` for Adam (four times the weights) and DeepSpeed's for ZeRO-2 on
one device (20 bytes for each parameter), and for ZeRO-3 on two (12).
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
BYTES_PER_PARAMETER = {1: 20.0, 2: 4.0 + 16.0 / 2}
"""Of model states on the device, by ranks. Source: DeepSpeed's documentation of memory,
`estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs`."""

_MLP = """
import torch
from torch import nn
net = nn.Sequential(*[nn.Sequential(nn.Linear({width}, {width}), nn.GELU()) for _ in range(8)])
optimizer = {optimizer}
for _ in range(2):
    x = torch.randn({width} // 6, {width})
    nn.functional.mse_loss(net(x), torch.zeros_like(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_GPT2 = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
config = GPT2Config(n_layer={layers}, n_embd={width}, n_head=12, vocab_size={vocabulary})
config._attn_implementation = "{attention}"
net = GPT2LMHeadModel(config).train()
{after}
optimizer = {optimizer}
for _ in range(2):
    tokens = torch.randint(0, {vocabulary}, ({batch}, 256))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled={bf16}):
        loss = net(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_BERT = """
import torch
from transformers import BertConfig, BertForSequenceClassification
config = BertConfig(num_hidden_layers={layers}, hidden_size={width}, intermediate_size=4 * {width})
net = BertForSequenceClassification(config).train()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(2):
    tokens = torch.randint(0, 30000, (8, 128))
    mask, labels = torch.ones_like(tokens), torch.zeros(8).long()
    net(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_RESNET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(3))
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(y)) + self.norms[2](self.short(x))).relu()

sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, {width}, 2)]
blocks = [block for i, o, s in sizes for block in (Block(i, o, s), Block(o, o, 1))]
net = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
    *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear({width}, 10),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for _ in range(2):
    x = torch.randn(16, 3, {pixels}, {pixels})
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled={bf16}):
        loss = nn.functional.cross_entropy(net(x), torch.zeros(16).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_ADAMW = "torch.optim.AdamW(net.parameters())"
_SGD = "torch.optim.SGD(net.parameters(), lr=0.1)"
_SIZES: dict[str, dict[str, Any]] = {
    "full": {"width": 768, "layers": 12, "vocabulary": 50257, "pixels": 224},
    "small": {"width": 192, "layers": 2, "vocabulary": 500, "pixels": 96},
}


class Case(NamedTuple):
    """One script: its text, how it is trained, and how far the estimate may be off."""

    name: str
    text: str
    tolerance: float = 0.02
    ranks: int = 1
    checkpointed: bool = False


class Measured(NamedTuple):
    """The truth about a case."""

    peak_bytes: int
    num_parameters: int
    seconds: float


class Row(NamedTuple):
    """One line of the table; the differences are relative to the truth."""

    case: str
    true_mib: float
    estimate: float
    accelerate: float
    deepspeed: float
    seconds: float
    real_seconds: float
    tolerance: float


def cases(size: str) -> list[Case]:
    """Return the cases; those of a convolution have a workspace that no tensor holds.

    mse_loss() has one, too, of the size of its input: a small perceptron has a small batch, so that
    its peak is in the same step as that of the large one, and not in the loss.
    """
    sizes = _SIZES[size]
    mlp_width = 1536 if size == "full" else 256
    gpt2 = {
        **sizes,
        "attention": "sdpa",
        "after": "",
        "optimizer": _ADAMW,
        "batch": 2,
        "bf16": False,
    }

    def gpt(name: str, **changes: Any) -> Case:
        return Case(name, _GPT2.format(**{**gpt2, **changes}))

    mlp = _MLP.format(width=mlp_width, optimizer=_ADAMW)
    return [
        Case("MLP AdamW", mlp),
        Case("MLP SGD", _MLP.format(width=mlp_width, optimizer=_SGD)),
        gpt("GPT-2 4x256 AdamW", batch=4),
        gpt("GPT-2 2x256 eager", attention="eager"),
        gpt("GPT-2 2x256 SGD", optimizer=_SGD),
        gpt("GPT-2 2x256 checkpointing", after="net.gradient_checkpointing_enable()"),
        gpt("GPT-2 2x256 bf16", bf16=True),
        Case("BERT", _BERT.format(**{**sizes, "layers": sizes["layers"] // 2})),
        Case("ResNet", _RESNET.format(**{**sizes, "width": 512}, bf16=False), 0.05),
        Case("ResNet bf16", _RESNET.format(**{**sizes, "width": 512}, bf16=True), 0.05),
        Case("MLP FSDP, 2 ranks", mlp, ranks=2),
        Case("MLP FSDP checkpointing, 2 ranks", mlp, ranks=2, checkpointed=True),
    ]


# ------------------------------------------------------------------ the truth


class _Enough(BaseException):
    """The script has made its second optimizer step."""


def measure_one(script: str) -> Measured:
    """Run a script's two steps under torch's profiler, in this process."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    trained: list[int] = []
    _stop_after_two_steps(trained)
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with suppress(_Enough):
            runpy.run_path(script, run_name="__main__")
        seconds = time.perf_counter() - began
    results = profiler.profiler.kineto_results
    events = [*_events(results.experimental_event_tree())]
    allocations = sorted(
        (event.start_time_ns, event.extra_fields.alloc_size)
        for event in events
        if event.tag == torch._C._profiler._EventType.Allocation
    )
    current = peak = 0
    for _, change in allocations:
        current += change
        peak = max(peak, current)
    return Measured(peak, trained[0], seconds)


def _events(tree: Sequence[Any]) -> Iterator[Any]:
    waiting = [*tree]
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def _stop_after_two_steps(trained: list[int]) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0

    def count(optimizer: Any, *_: Any) -> None:
        nonlocal steps
        steps += 1
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        trained[:] = [sum(p.numel() for p in parameters)]
        if steps == 2:
            raise _Enough

    register_optimizer_step_post_hook(count)


def measure_sharded(script: str, checkpointed: bool) -> Measured:
    """Run a script's two steps as a rank of gloo, its model `net` sharded before its optimizer.

    The storages that live are counted by the tracker that also counts fake ones.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from headway.estimate.child import script_patches
    from headway.estimate.child.ledger import Ledger
    from headway.strategies.units import checkpoint_activations, units_of

    dist.init_process_group("gloo")
    trained: list[int] = []
    _stop_after_two_steps(trained)
    ledger = Ledger(torch.device("cpu"))
    script_patches.patch_resize(ledger.resized)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = torch.optim.AdamW.__init__

    def init(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
        net = sys._getframe(1).f_globals["net"]
        made(self, [*parameters], *args, **kwargs)
        units = units_of(net)
        if checkpointed:
            checkpoint_activations(units)
        script_patches.shard(net, units, [self], mesh)
        ledger.reset_peak()

    torch.optim.AdamW.__init__ = init  # type: ignore[assignment, method-assign]
    began = time.perf_counter()
    with ledger, suppress(_Enough):
        runpy.run_path(script, run_name="__main__")
    return Measured(ledger.peak_bytes, trained[0], time.perf_counter() - began)


def truth(case: Case, script: str) -> Measured:
    """Return the truth about a case, measured in processes of its own."""
    command = [sys.executable, __file__, "--truth", script]
    command += ["--checkpointed"] * case.checkpointed
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}
    if case.ranks > 1:
        environ |= {"WORLD_SIZE": str(case.ranks), "MASTER_PORT": str(_free_port())}
    processes = [
        subprocess.Popen(
            command,
            env={**environ, "RANK": str(rank)} if case.ranks > 1 else environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(case.ranks)
    ]
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{case.name} could not be run")
    return Measured(**json.loads(said[0].splitlines()[-1]))


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


# ------------------------------------------------------------------ the comparison


def compare(case: Case, folder: Path) -> Row:
    """Return the line of one case."""
    from headway.estimate.planner import Planner, Trial

    script = folder / "case.py"
    script.write_text(case.text)
    is_sharded = case.ranks > 1
    with Planner([sys.executable], {**os.environ, "PYTHONPATH": str(ROOT)}) as planner:
        attempt = Trial(
            str(script),
            (),
            world_size=case.ranks,
            local_world_size=case.ranks,
            sharded=is_sharded,
            checkpointed=case.checkpointed,
        )
        outcome = planner.run(attempt)
    if outcome.failed_at:
        raise SystemExit(f"{case.name}: {outcome.failed_at}")
    true = truth(case, str(script))
    weights = 4 * true.num_parameters * case.ranks  # in fp32
    formula = true.num_parameters * case.ranks * BYTES_PER_PARAMETER[case.ranks]
    return Row(
        case.name,
        true.peak_bytes / MIB,
        outcome.peak_bytes / true.peak_bytes - 1,
        4 * weights / true.peak_bytes - 1,
        formula / true.peak_bytes - 1,
        outcome.seconds,
        true.seconds,
        case.tolerance,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--size", choices=_SIZES, default="full")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--json", help="write the table to this file as well")
    parser.add_argument("--truth", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.truth:
        is_rank = "RANK" in os.environ
        found = (
            measure_sharded(options.truth, options.checkpointed)
            if is_rank
            else measure_one(options.truth)
        )
        print(json.dumps(found._asdict()), flush=True)
        os._exit(0)
    rows = []
    heads = f"{'true MiB':>10}{'headway':>9}{'accel. x4':>11}{'DeepSpeed':>11}"
    print(f"{'case':<28}{heads}   seconds: estimate, real")
    for case in cases(options.size):
        if options.only.lower() not in case.name.lower():
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = compare(case, Path(folder))
        rows.append(row)
        print(
            f"{row.case:<28}{row.true_mib:>10.2f}{row.estimate:>+9.2%}{row.accelerate:>+11.0%}"
            f"{row.deepspeed:>+11.0%}{row.seconds:>11.1f}{row.real_seconds:>9.1f}",
            flush=True,
        )
    if options.json:
        Path(options.json).write_text(json.dumps([row._asdict() for row in rows], indent=2))
    off = [row.case for row in rows if abs(row.estimate) > row.tolerance]
    if off:
        raise SystemExit(f"further off than they may be: {', '.join(off)}")


if __name__ == "__main__":
    main()
