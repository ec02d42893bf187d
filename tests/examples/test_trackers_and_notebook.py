"""The examples that log and that start ranks from a notebook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import launching
from tests.distributed.launching import environment
from tests.examples.test_examples import EXAMPLES, HEADWAY, PYTHON, run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_pythons")]

RUN_NOTEBOOK = """\
import sys, nbclient, nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=150, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", ""), end="")
"""


@pytest.mark.distributed
def test_figures_are_logged_once_on_two_ranks(tmp_path: Path) -> None:
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
    assert "epoch 1, 2 ranks: " in notebook_output(EXAMPLES / "notebook.ipynb", tmp_path)


def notebook_output(notebook: Path, folder: Path) -> str:
    """Run a notebook to its end in `folder`, and return what its cells printed."""
    scratch = folder / "scratch"
    scratch.mkdir()
    environ = environment(TMPDIR=str(scratch), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    command = [*PYTHON, "-c", RUN_NOTEBOOK, str(notebook)]
    done = launching.run(command, environ, timeout_s=170, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout
