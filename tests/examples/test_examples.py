"""The examples do what their docstrings promise, under every launcher they name."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.distributed import launching
from tests.waiting import IS_LONG

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_pythons")]


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_TEST_SAMPLES = 449

PYTHON = [sys.executable]
ONE = [*PYTHON]  # what several ranks are compared with: forked, as they are
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
HEADWAY = [*PYTHON, "-m", "headway", "launch", "--cpu", "--num-processes", "2"]

CHECK_MODEL = """
import runpy, sys, torch

digits = runpy.run_path(sys.argv[1])
model = digits["build_model"]()
model.load_state_dict(torch.load(sys.argv[2], weights_only=True))
images, labels = digits["load_datasets"]()[1].tensors
print(int((model.eval()(images).argmax(dim=1) == labels).sum()))
"""


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [
        pytest.param(PYTHON, 1, id="plain python", marks=pytest.mark.long),
        pytest.param(TORCHRUN, 2, id="torchrun", marks=[pytest.mark.distributed, pytest.mark.long]),
        pytest.param(HEADWAY, 2, id="headway launch", marks=pytest.mark.distributed),
    ],
)
def test_digits_learns_counts_each_test_sample_once_and_saves_its_model(
    launcher: list[str], num_ranks: int, tmp_path: Path
) -> None:
    stdout, stderr = run(launcher, "digits.py", tmp_path, "--epochs", "8")

    assert re.findall(r"number of ranks: (\d+)", stdout) == [str(num_ranks)]
    [(accuracy, num_correct, num_samples)] = re.findall(
        r"test accuracy: (\S+) \((\d+) of (\d+)\)", stdout
    )
    assert float(accuracy) >= 0.97
    assert int(num_samples) == NUM_TEST_SAMPLES
    assert "training: 100%" in stderr
    assert "[1] training" not in stderr, "a progress bar on the main process alone"
    assert num_correct_of_saved_model(tmp_path / "digits.pt") == int(num_correct)


@pytest.mark.distributed
def test_char_gpt_learns_within_a_few_steps_and_samples(tmp_path: Path) -> None:
    options = ["--steps", "40", "--batch-size", "16", "--sample-length", "50"]
    stdout, _ = run(HEADWAY, "char_gpt.py", tmp_path, *options)

    first, *_, last = losses(stdout)
    assert first > 4.5, "an untrained model knows nothing of 128 characters"
    assert last < 3.5
    assert len(stdout.partition("sample:\n")[2].rstrip("\n")) >= len("def ") + 40


ACCURACY = r"test accuracy \S+ \((\d+) of (\d+)\)"


@pytest.mark.distributed
def test_metrics_count_each_sample_of_two_ranks_once(tmp_path: Path) -> None:
    two = run(HEADWAY, "metrics.py", tmp_path)[0]

    assert "test samples: 59 of 59" in two
    (accuracy,) = (float(text) for text in re.findall(r"accuracy: (\S+)", two))
    assert accuracy >= 0.95
    confusion = json.loads(re.findall(r"confusion: (.*)", two)[0])
    assert [sum(row) for row in confusion] == [20, 23, 16], "the samples of each class"


@pytest.mark.distributed
def test_accumulation_changes_neither_the_steps_nor_the_outcome(tmp_path: Path) -> None:
    at_once, _ = run(ONE, "accumulation.py", tmp_path)
    for launcher, shape in ((ONE, "1 ranks x 8"), (HEADWAY, "2 ranks x 4")):
        stdout, _ = run(launcher, "accumulation.py", tmp_path, "--micro-batch-size", "8")
        assert f"{shape} micro-batches of 8: 30 optimizer steps" in stdout
        assert mean_loss(stdout) == pytest.approx(mean_loss(at_once), abs=2e-6)
    assert mean_loss(at_once) < 0.55


@pytest.mark.distributed
def test_a_stream_is_shared_out_and_measured_as_one_process_reads_it(tmp_path: Path) -> None:
    one, two = (stats(run(launcher, "iterable.py", tmp_path)[0]) for launcher in (ONE, HEADWAY))

    assert one[-1].endswith("on 101 test samples")
    first, *_, last = (float(line.split()[3]) for line in one)
    assert last < first / 2
    for line, other in zip(one, two, strict=True):
        assert float(line.split()[3]) == pytest.approx(float(other.split()[3]), abs=2e-4)
        assert line.split()[4:] == other.split()[4:]


@pytest.mark.distributed
def test_a_model_of_transformers_learns_to_tell_the_classes_apart(tmp_path: Path) -> None:
    stdout, _ = run(HEADWAY if IS_LONG else HEADWAY[:-2], "transformers_classifier.py", tmp_path)

    num_correct, num_samples = re.findall(ACCURACY, stdout)[-1]
    assert num_samples == "211"
    assert int(num_correct) >= 0.95 * 211


@pytest.mark.timeout(300)  # three runs, of which each imports torch in two ranks
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(HEADWAY[:-2], id="1 rank", marks=pytest.mark.long),
        pytest.param(HEADWAY, id="2 ranks", marks=pytest.mark.distributed),
    ],
)
def test_a_training_that_was_stopped_ends_with_the_weights_of_one_that_was_not(
    launcher: list[str], tmp_path: Path
) -> None:
    def last_line(*flags: str, code: int = 0, nap: str = "0", project: str = "stopped") -> str:
        options = ["--project", project, "--epochs", "2", "--nap", nap]
        stdout, _ = run([*launcher, *flags], "resume.py", tmp_path, *options, code=code)
        return stdout.splitlines()[-1] if stdout else ""

    last_line("--time-limit", "1s", code=75, nap="0.1")
    stopped, whole = last_line(), last_line(project="whole")
    assert "from step 0 on" in whole
    assert "from step 0 on" not in stopped
    assert stopped.split(";")[1] == whole.split(";")[1]


@pytest.mark.distributed
def test_a_sharded_model_learns_goes_on_from_its_checkpoint_and_is_saved(tmp_path: Path) -> None:
    stdout, stderr = run([*HEADWAY, "--strategy", "fsdp"], "fsdp.py", tmp_path, "--epochs", "1")

    [(own, total)] = re.findall(r"([\d,]+) of ([\d,]+) parameters", stdout)
    assert int(own.replace(",", "")) <= 0.51 * int(total.replace(",", ""))
    before, after = (float(loss) for loss in re.findall(r"loss (\S+),", stdout))
    assert after < before < 1.5
    assert "4 of Block" in stderr
    assert len(list((tmp_path / "fsdp-model").glob("*.safetensors"))) > 3


def run(
    launcher: list[str], example: str, folder: Path, *options: str, code: int = 0
) -> tuple[str, str]:
    """Run an example to its end in `folder`, and return its stdout and stderr."""
    scratch = folder / "scratch"  # torchrun leaves a folder behind
    scratch.mkdir(exist_ok=True)
    command = [*launcher, str(EXAMPLES / example), *options]
    # threads of torch spin while they wait for each other: on busy cores for minutes
    env = launching.environment(TMPDIR=str(scratch), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    with launching.executed() if launcher is PYTHON else nullcontext():
        done = launching.run(command, env, timeout_s=150, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def losses(stdout: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+ +loss (\S+)", stdout)]


def stats(stdout: str) -> list[str]:
    """Return the lines that an example printed, without a launcher's prefix."""
    return [line.removeprefix("[0] ") for line in stdout.splitlines()]


def mean_loss(stdout: str) -> float:
    return float(re.findall(r"mean loss: (\S+)", stdout)[0])


def num_correct_of_saved_model(path: Path) -> int:
    """Return how many of the test samples a saved model recognises, without any launcher."""
    words = [*PYTHON, launching.script(CHECK_MODEL), str(EXAMPLES / "digits.py"), str(path)]
    done = launching.run(words, launching.environment(CUDA_VISIBLE_DEVICES=""), timeout_s=150)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


RUN_NOTEBOOK = """\
import sys, nbclient, nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=150, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", ""), end="")
"""


@pytest.mark.distributed
def test_stats_are_logged_once_on_two_ranks(tmp_path: Path) -> None:
    run(HEADWAY, "trackers.py", tmp_path, "--folder", "runs")

    [log] = (tmp_path / "runs").rglob("*.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [row["values"]["loss"] for row in rows if "loss" in row.get("values", {})]
    assert len(losses) == 8, "every fifth of 40 steps"
    assert losses[-1] < losses[0] / 2


@pytest.mark.distributed
def test_the_notebook_trains_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    stdout, _ = run([*PYTHON, "-c", RUN_NOTEBOOK], "notebook.ipynb", tmp_path)
    assert "epoch 1, 2 ranks: " in stdout
