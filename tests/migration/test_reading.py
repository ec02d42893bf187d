"""The names that a script imports from Accelerate are found, however the script names them."""

from __future__ import annotations

import pytest

from headway.migration.scripts import Script, shown


def names(text: str) -> dict[str, list[int]]:
    return {shown(*name): lines for name, lines in Script(text).names.items()}


def test_names_are_found_through_every_form_of_import() -> None:
    found = names("""\
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


def test_attributes_are_found_of_whatever_object_and_arguments_of_accelerators() -> None:
    script = Script("""\
import accelerate
from accelerate import Accelerator
one = Accelerator(log_with="all", cpu=None, **others)
accelerate.Accelerator(project_dir=".")
self.trainer.one.prepare(sched)
other(deepspeed_plugin=1).reduce(2)
""")
    assert script.keywords == {"log_with": [3], "project_dir": [4]}
    assert script.attributes.items() >= {"prepare": [5], "reduce": [6]}.items()


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.accelerator.current_device_index()\n",
        "from .accelerate import Accelerator\nAccelerator().print\n",
        "import accelerated\naccelerated.x\n",
    ],
)
def test_other_modules_are_not_taken_for_accelerate(text: str) -> None:
    assert not Script(text).imports
    assert not names(text)
