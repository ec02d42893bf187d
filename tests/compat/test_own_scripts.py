"""The scripts that Accelerate tests itself with pass when Headway replaces its runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import launch

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("torch")
pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("warm_pythons")]

FOLDER = Path(accelerate.__file__).parent / "test_utils" / "scripts"
LEFT_OUT = {
    # an Accelerator of ours outlives the reset of a state that it shares with others
    "test_script": ("        test_reinstantiated_state()\n",),
    "test_distributed_data_loop": (
        # distributed_type cannot be set: it is what the ranks do
        "    accelerator.state.distributed_type = DistributedType.FSDP\n",
        "    test_join_raises_warning_for_non_ddp_distributed(accelerator)\n",
        "    accelerator.state.distributed_type = original_state\n",
    ),
}


@pytest.mark.parametrize(
    ("name", "num_processes"),
    [
        ("test_ops", 2),
        pytest.param("test_ops", 3, marks=pytest.mark.long),
        pytest.param("test_sync", 1, marks=pytest.mark.long),
        pytest.param("test_sync", 2, marks=pytest.mark.long),
        pytest.param("test_script", 1, marks=pytest.mark.long),
        pytest.param("test_script", 2, marks=pytest.mark.long),
        pytest.param("test_distributed_data_loop", 2, marks=pytest.mark.long),
    ],
)
def test_a_script_passes(name: str, num_processes: int, tmp_path: Path) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    for line in LEFT_OUT.get(name, ()):
        assert text.count(line) == 1
        text = text.replace(line, line[: len(line) - len(line.lstrip())] + "pass\n")
    script = tmp_path / f"{name}.py"
    script.write_text(text)
    words = ("--cpu", "--replace-accelerate", f"--num-processes={num_processes}")
    launch(*words, str(script), code=0)
