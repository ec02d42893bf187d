"""What is found about a script: its peak, what that is made of, and under other strategies."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.estimate.attempt import OFFLOADED, REAL
from tests.estimate.following import ROOT, Server

pytestmark = pytest.mark.processes

MIB = 2**20
LAYERS, WIDTH, BATCH = 6, 256, 64
TRAINING = f"""
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU()) for _ in range({LAYERS})]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear({WIDTH}, 10)
        self.register_buffer("scale", torch.ones({WIDTH}))

    def forward(self, x):
        return self.head(self.blocks(x * self.scale))

device = "cuda" if torch.cuda.is_available() else "cpu"
net = Net().to(device)
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    x = torch.randn({BATCH}, {WIDTH}).to(device)
    y = torch.randint(0, 10, ({BATCH},), device=device)
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WEIGHTS = 4 * (LAYERS * (WIDTH * WIDTH + WIDTH) + WIDTH * 10 + 10)  # bytes in fp32


@pytest.fixture
def script() -> Path:
    path = Path("train.py")
    path.write_text(TRAINING)
    return path


def test_a_script_takes_as_much_on_fake_tensors_as_on_real_ones(
    script: Path, server: Server
) -> None:
    fake = server.follow(script)
    real = server.follow(script, rung="real steps")
    assert (fake.rung, real.rung, real.steps) == ("fake tensors", "real steps", 2)
    assert fake.peak_bytes == real.peak_bytes
    assert fake.categories == real.categories


def test_the_peak_is_the_sum_of_its_parts_and_they_are_what_they_are_called(
    script: Path, server: Server
) -> None:
    found = server.follow(script, device="cuda")
    assert sum(found.categories.values()) == found.peak_bytes
    assert found.categories["parameters"] == WEIGHTS
    assert found.categories["gradients"] == WEIGHTS
    assert found.categories["buffers"] == 4 * WIDTH
    # two moments, and foreach's two temporary lists, as on CUDA
    assert 2 * WEIGHTS <= found.categories["optimizer"] <= 4.1 * WEIGHTS
    assert found.modules[0].module == "blocks.*.*"
    assert found.modules[0].bytes["parameters"] == WEIGHTS - 4 * (WIDTH * 10 + 10)


def test_data_parallel_training_takes_a_copy_of_the_gradients_more(server: Server) -> None:
    path = Path("ddp.py")
    wrapped = "net = nn.parallel.DistributedDataParallel(net)\noptimizer ="
    start = "import torch.distributed as dist; dist.init_process_group()\nnet = Net()"
    path.write_text(TRAINING.replace("optimizer =", wrapped).replace("net = Net()", start))
    several = server.follow(path, device="cuda", world_size=4, local_world_size=4)
    alone = Path("alone.py")
    alone.write_text(TRAINING)
    one = server.follow(alone, device="cuda")
    assert several.categories["gradients"] == one.categories["gradients"] + WEIGHTS
    parts = {part.module: part.bytes for part in several.modules}
    assert parts["DistributedDataParallel"]["gradients"] == WEIGHTS
    assert "Net" in parts


def test_sharded_states_are_a_fraction_and_the_units_are_the_repeated_blocks(
    script: Path, server: Server
) -> None:
    world = {"device": "cuda", "world_size": 4, "local_world_size": 4}
    found = server.follow(script, sharded=True, **world)
    assert sorted(found.units) == [f"blocks.{number}" for number in range(LAYERS)]
    unit = 4 * (WIDTH * WIDTH + WIDTH)
    assert found.peak_bytes < server.follow(script, **world).peak_bytes
    for name in ("parameters", "gradients"):
        assert abs(found.categories[name] - WEIGHTS / 4) < unit, found.categories


def test_optimizer_states_from_before_the_first_step_are_sharded_as_well(server: Server) -> None:
    path = Path("adagrad.py")
    path.write_text(TRAINING.replace("AdamW(", "Adagrad("))
    world = {"device": "cuda", "world_size": 2, "local_world_size": 2}
    whole, shared = server.follow(path, **world), server.follow(path, sharded=True, **world)
    assert shared.rung == whole.rung == "fake tensors", (shared, whole)
    assert shared.categories["parameters"] <= 0.51 * WEIGHTS
    assert shared.peak_bytes < whole.peak_bytes


def test_a_strategy_in_the_script_is_left_to_those_that_are_compared(server: Server) -> None:
    said = 'strategy="fsdp", activation_checkpointing=True, cpu_offload=True'
    own, plain = Path("own.py"), Path("plain.py")
    for path, arguments in ((own, said), (plain, "")):
        made = f"from headway import Accelerator\naccelerator = Accelerator({arguments})\n"
        prepared = "net, optimizer = accelerator.prepare(net, optimizer)\nfor _ in range(3):"
        path.write_text(made + TRAINING.replace("for _ in range(3):", prepared))
    world = {"device": "cuda", "world_size": 2, "local_world_size": 2}
    for sharded in (False, True):
        found, expected = (server.follow(one, sharded=sharded, **world) for one in (own, plain))
        assert found.rung == "fake tensors", found
        assert found.peak_bytes == expected.peak_bytes
        assert [*found.notes] != [*expected.notes]


@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_offloaded_is_not_counted_however_few_steps_there_are(
    steps: int, server: Server
) -> None:
    path = Path("few.py")
    path.write_text(TRAINING.replace("range(3)", f"range({steps})"))
    world = {"device": "cuda", "world_size": 2, "local_world_size": 2}
    found = server.follow(path, sharded=True, offloaded=True, **world)
    assert found.steps == min(steps, 2)
    assert not any(found.categories[name] for name in OFFLOADED), found.categories


def test_recomputed_activations_take_less(server: Server) -> None:
    path = Path("wide.py")
    wide = f"nn.Linear({WIDTH}, {4 * WIDTH}), nn.GELU(), nn.Linear({4 * WIDTH}, {WIDTH})"
    block = (
        "from torch import nn\n"
        "class Wide(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.layers = nn.Sequential({wide})\n"
        "    def forward(self, x):\n"
        "        return self.layers(x)\n"
    )
    text = block + TRAINING.replace(
        f"nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU())", "Wide()"
    )
    path.write_text(
        text.replace(f"randn({BATCH},", "randn(4096,").replace(f"({BATCH},)", "(4096,)")
    )
    plain = server.follow(path)
    assert server.follow(path, checkpointed=True).peak_bytes < plain.peak_bytes - 64 * MIB


def test_parts_of_a_recomputed_block_are_not_sharded_by_themselves(
    script: Path, server: Server
) -> None:
    world = {"world_size": 2, "local_world_size": 2, "sharded": True}
    recomputed = server.follow(script, checkpointed=True, **world)
    assert recomputed.peak_bytes <= server.follow(script, **world).peak_bytes
    assert len(set(recomputed.units)) == len(recomputed.units)


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "l1_loss", "soft_margin_loss"])
def test_a_loss_that_keeps_its_temporary_is_counted_with_it(loss: str, server: Server) -> None:
    path = Path("loss.py")
    path.write_text(
        "import torch\n"
        "net = torch.nn.Linear(8, 1000)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(2):\n"
        f"    loss = torch.nn.functional.{loss}(net(torch.ones(500, 8)), torch.ones(500, 1000))\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    fake, real = server.follow(path), server.follow(path, rung=REAL, memory_limit_bytes=2**30)
    assert fake.peak_bytes == real.peak_bytes


def test_half_precision_and_accumulation_are_the_script_s_own(server: Server) -> None:
    path = Path("halved.py")
    path.write_text(
        TRAINING.replace("Net().to(device)", "Net().to(device).bfloat16()").replace(
            ".to(device)\n    y", ".to(device).bfloat16()\n    y"
        )
    )
    found = server.follow(path, device="cuda")
    assert found.rung == "fake tensors", found
    assert found.categories["parameters"] == WEIGHTS // 2


def test_a_model_far_larger_than_this_machine_is_followed(server: Server) -> None:
    path = Path("large.py")
    path.write_text(
        TRAINING.replace(f"Linear({WIDTH}, {WIDTH})", f"Linear({WIDTH}, {WIDTH} * 10**6)").replace(
            "nn.ReLU())", f"nn.ReLU(), nn.Linear({WIDTH} * 10**6, {WIDTH}))"
        )
    )
    found = server.follow(path, device="cuda")
    assert found.rung == "fake tensors", found
    assert found.categories["parameters"] > 2**41


def test_a_script_that_fails_has_its_states_alone_and_its_line(server: Server) -> None:
    path = Path("fails.py")
    path.write_text(
        TRAINING.replace("for _ in range(3):", "for _ in range(3):\n    raise KeyError('x')")
    )
    found = server.follow(path, device="cuda")
    assert found.rung == "states alone"
    line = 1 + path.read_text().splitlines().index("    raise KeyError('x')")
    assert f"fails.py, line {line}: KeyError" in found.failed_at
    assert found.categories["parameters"] == found.categories["gradients"] == WEIGHTS
    # AdamW's two moments, and a count of steps for each parameter, which stays on the host
    assert found.categories["optimizer"] == 2 * WEIGHTS
    assert found.categories["activations"] == 0
    assert found.peak_bytes == sum(found.categories.values())


def test_a_script_may_replace_its_streams_and_close_all_descriptors(server: Server) -> None:
    path = Path("closing.py")
    path.write_text(f"import os, sys\nos.closerange(3, 256)\nsys.stdout = None\n{TRAINING}")
    found = server.follow(path)
    assert (found.rung, found.steps) == ("fake tensors", 2), found


def test_a_script_without_end_is_stopped_at_its_line(server: Server) -> None:
    path = Path("endless.py")
    path.write_text(TRAINING.replace("for _ in range(3):", "while True: pass\nfor _ in range(3):"))
    found = server.follow(path, time_limit_s=5)
    assert found.rung == "states alone"
    line = 1 + path.read_text().splitlines().index("while True: pass")
    assert f"endless.py, line {line}" in found.failed_at


def test_real_steps_stop_at_the_memory_that_they_may_take(script: Path, server: Server) -> None:
    found = server.follow(script, rung="real steps", memory_limit_bytes=MIB)
    assert found.rung == ""
    assert "MemoryError" in found.failed_at


def test_a_script_that_crashes_in_native_code_names_its_line(server: Server) -> None:
    path = Path("crash.py")
    path.write_text("import ctypes\n\nctypes.string_at(0)\n")
    found = server.follow(path)
    assert found.rung == ""
    assert "crash.py, line 3" in found.failed_at


def test_the_examples_are_followed(server: Server) -> None:
    world = {"device": "cuda", "world_size": 2, "local_world_size": 2}
    found = server.follow(
        ROOT / "examples" / "char_gpt.py", "--size", "124m", "--batch-size", "8", **world
    )
    assert (found.rung, found.steps) == ("fake tensors", 2), found
    assert 4 * 124e6 < found.categories["parameters"] < 4 * 126e6
