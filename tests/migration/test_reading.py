"""What a script takes from Accelerate is found, however the script names it."""

from __future__ import annotations

import pytest

from headway.migration.reading import Script


def needs(text: str) -> dict[str, list[int]]:
    return {str(need): lines for need, lines in Script(text).needs.items()}


def test_names_are_found_through_every_form_of_import() -> None:
    found = needs("""\
import os, accelerate
import accelerate.utils.operations as operations
from accelerate import Accelerator as A, utils
from accelerate.utils import (
    set_seed,
    tqdm,
)

accelerate.state.PartialState()
operations.gather(1)
utils.reduce
accelerate.__version__
accelerate.utils.tqdm
""")
    assert found == {
        "accelerate.utils.operations": [2],
        "accelerate.Accelerator": [3],
        "accelerate.utils": [3],
        "accelerate.utils.set_seed": [5],
        "accelerate.utils.tqdm": [6, 13],
        "accelerate.state.PartialState": [9],
        "accelerate.utils.operations.gather": [10],
        "accelerate.utils.reduce": [11],
        "accelerate.__version__": [12],
    }


@pytest.mark.parametrize(
    "how",
    [
        "x = Accelerator(); x.print",
        "class T:\n    def __init__(self): self.x = Accelerator(); self.x.print",
        "def f(x: Accelerator): x.print",
        "def f(x: 'int', y: Accelerator | None = None): y.print",
        "def f(accelerator): accelerator.print",
        "class T:\n    def f(self): self.accelerator.print",
        "trainer.accelerator.print",
        "Accelerator().print",
        "if (x := Accelerator()): x.print",
    ],
)
def test_members_of_an_accelerator_are_found_wherever_it_comes_from(how: str) -> None:
    assert "Accelerator.print" in needs(f"from accelerate import Accelerator\n{how}\n")


def test_members_of_its_state_and_arguments_are_found() -> None:
    found = needs("""\
from accelerate import Accelerator, DistributedDataParallelKwargs as Kwargs
accelerator = Accelerator(log_with="all", cpu=None, **others)
state = accelerator.state
state.deepspeed_plugin
Kwargs(find_unused_parameters=True)
accelerator.gather_for_metrics(x, use_gather_object=True)
accelerator.prepare(model, lr_scheduler, self.train_loader)
""")
    assert found.keys() >= {
        "Accelerator(log_with=)",
        "AcceleratorState.deepspeed_plugin",
        "DistributedDataParallelKwargs(find_unused_parameters=)",
        "Accelerator.gather_for_metrics(use_gather_object=)",
        "Accelerator.prepare(scheduler)",
        "Accelerator.prepare(loader)",
    }
    assert "Accelerator(cpu=)" not in found  # None is as good as no argument


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.accelerator.current_device_index()\n",
        "from .accelerate import Accelerator\nAccelerator().print\n",
        "import accelerated\naccelerated.x\n",
        "def f(accelerator): accelerator.print\n",  # Accelerate is not imported
    ],
)
def test_others_are_not_taken_for_accelerate(text: str) -> None:
    assert not needs(text)


def test_another_modules_accelerator_is_not_taken_for_one() -> None:
    found = needs("import torch\nimport accelerate\ntorch.accelerator.is_available()\n")
    assert not found


@pytest.mark.parametrize(
    ("condition", "is_counted"),
    [
        ("os.environ.get('TESTING_MOCKED_DATALOADERS', None) == '1'", False),
        ("os.environ.get('RUN_TESTS')", False),
        ("args.fast and os.getenv('TESTING', '0') == '1'", False),
        ("os.environ['TESTING'] == '1'", False),
        ("os.environ.get('TESTING', '0') == '0'", True),
        ("os.environ.get('TESTING', '1')", True),
        ("not os.environ.get('TESTING')", True),
        ("os.environ.get('TESTING') != '1'", True),
        ("os.environ.get('LARGE') == '1'", True),
        ("args.test", True),
    ],
)
def test_what_only_a_test_of_the_script_imports_is_not_counted(
    condition: str, is_counted: bool
) -> None:
    name = "from accelerate.test_utils.training import mocked_dataloaders"
    found = needs(f"from accelerate import Accelerator\nif {condition}:\n    {name}\n")
    assert ("accelerate.test_utils.training.mocked_dataloaders" in found) is is_counted
    assert "accelerate.Accelerator" in found
    assert "accelerate.utils.tqdm" in needs(
        f"if {condition}:\n    pass\nelse:\n    from accelerate.utils import tqdm\n"
    )
