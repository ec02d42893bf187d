"""What is found about a script: its peak, what that is made of, and under other strategies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.estimate.following import Follow, follower
from tests.estimate.test_confinement import TRAINING as SMALL

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
GPU = {"device": "cuda"}
TWO = {**GPU, "world_size": 2, "local_world_size": 2}
FOUR = {**GPU, "world_size": 4, "local_world_size": 4}


def line_of(path: Path, text: str) -> int:
    return 1 + path.read_text().splitlines().index(text)


def script(*changes: tuple[str, str], text: str = TRAINING) -> Path:
    """Write a training with these parts of it replaced, to a file of its own."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = Path(f"script_{len([*Path().iterdir()])}.py")
    path.write_text(text)
    return path


def test_the_peak_is_the_sum_of_its_parts_and_they_are_what_they_are_called(
    follow: Follow,
) -> None:
    found = follow(script(), **GPU)
    assert found.peak_at.startswith("in step 1, at ")
    assert sum(found.categories.values()) == found.peak_bytes
    assert found.categories["parameters"] == WEIGHTS
    assert found.categories["gradients"] == WEIGHTS
    assert found.categories["buffers"] == 4 * WIDTH
    # two moments, and foreach's two temporary lists, as on CUDA
    assert 2 * WEIGHTS <= found.categories["optimizer"] <= 4.1 * WEIGHTS


def test_a_peak_before_the_first_step_is_said_to_be_and_tensors_outside_of_modules_are_other(
    follow: Follow,
) -> None:
    data = "data = torch.empty(2**28)"
    path = script(("net = Net()", f"{data}\ndel data\nnet = Net()"))
    found = follow(path)
    assert found.peak_at.startswith("before the first forward pass, at ")
    assert found.peak_at.endswith(f"{path}, line {line_of(path, data)}")
    assert found.categories["other"] == found.peak_bytes == 2**30


def test_what_is_assumed_of_unknown_numbers_is_noted_with_its_line(follow: Follow) -> None:
    lines = ("loss = net(torch.ones(2, 4)).sum()", "if loss < 3: break", "float(loss)")
    text = "\n    ".join((*lines, "loss.backward()"))
    path = script(("net(torch.ones(2, 4)).sum().backward()", text), text=SMALL)
    found = follow(path)
    assert (found.failed_at, found.steps) == ("", 2)
    numbers = [line_of(path, f"    {line}") for line in lines]
    condition, read = found.notes
    assert condition.startswith("assumed: a condition on unknown numbers is False")
    assert condition.endswith(f"{path}, line {numbers[1]})")
    assert read.startswith("assumed: unknown numbers that the script reads are 1")
    assert read.endswith(f"{path}, line {numbers[2]})")


def test_data_parallel_training_takes_a_copy_of_the_gradients_more(follow: Follow) -> None:
    wrapped = "net = nn.parallel.DistributedDataParallel(net)\noptimizer ="
    start = "import torch.distributed as dist; dist.init_process_group()\nnet = Net()"
    several = follow(script(("optimizer =", wrapped), ("net = Net()", start)), **FOUR)
    assert several.categories["gradients"] == 2 * WEIGHTS


def test_sharded_states_are_a_fraction(follow: Follow) -> None:
    found = follow(script(), sharded=True, **FOUR)
    unit = 4 * (WIDTH * WIDTH + WIDTH)
    assert found.peak_bytes < follow(script(), **FOUR).peak_bytes
    for name in ("parameters", "gradients"):
        assert abs(found.categories[name] - WEIGHTS / 4) < unit, found.categories
    recomputed = follow(script(), sharded=True, checkpointed=True, **FOUR)
    assert recomputed.peak_bytes <= found.peak_bytes


def test_optimizer_states_from_before_the_first_step_are_sharded_as_well(follow: Follow) -> None:
    path = script(("AdamW(", "Adagrad("))
    whole, shared = follow(path, **TWO), follow(path, sharded=True, **TWO)
    assert shared.failed_at == whole.failed_at == "", (shared, whole)
    assert shared.categories["parameters"] <= 0.51 * WEIGHTS
    assert shared.peak_bytes < whole.peak_bytes


def test_a_strategy_in_the_script_is_left_to_those_that_are_compared(follow: Follow) -> None:
    paths = []
    for said in ('strategy="fsdp", activation_checkpointing=True, cpu_offload=True', ""):
        made = f"from headway import Accelerator\naccelerator = Accelerator({said})\n"
        prepared = "net, optimizer = accelerator.prepare(net, optimizer)\nfor _ in range(3):"
        paths.append(script(("for _ in range(3):", prepared), text=made + TRAINING))
    for sharded in (False, True):
        found, expected = (follow(path, sharded=sharded, **TWO) for path in paths)
        assert not found.failed_at, found
        assert found.peak_bytes == expected.peak_bytes
        assert found.notes
        assert not expected.notes


def test_recomputed_activations_take_less(follow: Follow) -> None:
    block = f"""
from torch import nn
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear({WIDTH}, {4 * WIDTH}), nn.GELU(), nn.Linear({4 * WIDTH}, {WIDTH})
        )
    def forward(self, x):
        return self.layers(x)
"""
    path = script(
        (f"nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU())", "Wide()"),
        (f"randn({BATCH},", "randn(4096,"),
        (f"({BATCH},)", "(4096,)"),
        text=block + TRAINING,
    )
    assert follow(path, checkpointed=True).peak_bytes < follow(path).peak_bytes - 64 * MIB


def test_half_precision_is_the_script_s_own(follow: Follow) -> None:
    path = script((".to(device)", ".to(device).bfloat16()"))
    found = follow(path, **GPU)
    assert not found.failed_at, found
    assert found.categories["parameters"] == WEIGHTS // 2


def test_a_model_far_larger_than_this_machine_is_followed(follow: Follow) -> None:
    path = script(
        (f"Linear({WIDTH}, {WIDTH})", f"Linear({WIDTH}, {WIDTH} * 10**6)"),
        ("nn.ReLU())", f"nn.ReLU(), nn.Linear({WIDTH} * 10**6, {WIDTH}))"),
    )
    found = follow(path, **GPU)
    assert not found.failed_at, found
    assert found.categories["parameters"] > 2**41


def test_a_script_that_fails_has_its_line(follow: Follow) -> None:
    path = script(("for _ in range(3):", "for _ in range(3):\n    raise KeyError('x')"))
    line = line_of(path, "    raise KeyError('x')")
    assert f"{path}, line {line}: KeyError" in follow(path, **GPU).failed_at


def test_a_script_without_end_says_where_it_is_and_is_stopped_at_its_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    endless = "import time; time.sleep(99)"
    path = script(("for _ in range(3):", f"{endless}\nfor _ in range(3):"))
    with follower() as follow:
        found = follow(path, time_limit_s=12)
    where = f"{path}, line {line_of(path, endless)}"
    assert where in found.failed_at
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith("headway: after 1")
    assert told.endswith(where)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("ctypes.string_at(0)", ", line 2: the process exited with signal "),
        ("print('said', flush=True); os._exit(3)", "the process exited with exit code 3"),
        ("open(os.environ['TMPDIR'] + '/../outcome', 'w').write('{}'); os._exit(3)", "code 3"),
    ],
)
def test_a_process_that_ends_by_itself_is_said_to_have_ended(
    call: str, expected: str, follow: Follow
) -> None:
    found = follow(script(text=f"import ctypes, os\n{call}\n"))
    assert expected in found.failed_at
    assert "said" not in call or found.output == "said\n"


UNTIDY = (
    "import os; os.closerange(0, 256)",
    "import sys; sys.stdout = sys.stderr = None",
    "import sys\nclass Tee:\n    def write(self, text): pass\nsys.stdout = Tee()",
    "import sys\nclass Broken:\n    def flush(self): raise SystemExit(1)\nsys.stdout = Broken()",
    "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'{}')\n    except OSError: pass",
)


def test_scripts_that_leave_their_process_in_disorder_are_followed(follow: Follow) -> None:
    for text in UNTIDY:
        found = follow(script(text=f"{text}\n{SMALL}"))
        assert (found.failed_at, found.steps) == ("", 2), (text, found)
