"""What tests of training scripts take from `headway.compat.test_utils`."""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from headway import Accelerator  # noqa: E402
from headway.compat import test_utils  # noqa: E402


def test_the_model_learns_the_line_of_the_data_set() -> None:
    accelerator = Accelerator(cpu=True)
    data = test_utils.RegressionDataset(a=2, b=3, length=96, seed=4)
    assert len(data) == 96
    model = test_utils.RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(20):
        for batch in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]))
            optimizer.step()
            optimizer.zero_grad()
    assert model.a.item() == pytest.approx(2, abs=0.1)
    assert model.b.item() == pytest.approx(3, abs=0.1)
    assert test_utils.are_the_same_tensors(model.a)


def fail(error: Exception) -> None:
    raise error


def test_an_exception_is_asserted_with_its_text() -> None:
    with test_utils.assert_exception(KeyError, "absent"):
        fail(KeyError("absent"))
    with pytest.raises(AssertionError), test_utils.assert_exception(KeyError):
        pass
    with pytest.raises(AssertionError), test_utils.assert_exception(KeyError, "other"):
        fail(KeyError("absent"))
    with pytest.raises(IndexError), test_utils.assert_exception(KeyError):
        fail(IndexError())


def test_tests_are_skipped_by_what_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(mark: str) -> str:
        class Case(unittest.TestCase):
            test_it = getattr(test_utils, mark)(lambda _: None)

        result = unittest.TestResult()
        Case("test_it").run(result)
        return "skipped" if result.skipped else "passed"

    monkeypatch.delenv("RUN_SLOW", raising=False)
    assert outcome("slow") == "skipped"
    monkeypatch.setenv("RUN_SLOW", "yes")
    assert outcome("slow") == "passed"
    is_cpu = test_utils.torch_device == "cpu"
    assert outcome("require_cpu") == ("passed" if is_cpu else "skipped")
    assert outcome("require_non_cpu") == ("skipped" if is_cpu else "passed")
    assert outcome("require_multi_device") == (
        "passed" if test_utils.device_count > 1 else "skipped"
    )


@pytest.mark.processes
def test_a_launch_is_run_and_its_failure_is_an_error(tmp_path: Path) -> None:
    words = test_utils.get_launch_command(cpu=True, num_processes=1, quiet=None)
    assert words == [
        *(sys.executable, "-m", "headway", "launch"),
        *("--cpu", "--num-processes=1"),
    ]
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1]); sys.exit(sys.argv[1] == 'no')")
    assert test_utils.execute_subprocess_async([*words, str(script), "yes"]).stdout == "yes\n"
    with pytest.raises(RuntimeError):
        test_utils.execute_subprocess_async([*words, str(script), "no"])
    with pytest.raises(subprocess.TimeoutExpired):
        test_utils.execute_subprocess_async([sys.executable, "-c", "input()"], timeout=0)
