"""A script's names of Accelerate are found, listed with their differences, and rewritten."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages

import pytest

pytest.importorskip("torch")

from headway.migration.scripts import (
    DIFFERENCES,
    DIFFERS,
    MISSING,
    SAME,
    Finding,
    Script,
    findings_of,
    shown,
    with_new_imports,
)

WANTED = Path(__file__).with_name("wanted.txt").read_text()
"""What public scripts take from Accelerate most often."""
LACKING = """
from accelerate import Accelerator, DeepSpeedPlugin, init_empty_weights, prepare_pippy
from accelerate.utils import BnbQuantizationConfig, MegatronLMPlugin, SageMakerDistributedType
import accelerate.big_modeling
Accelerator(deepspeed_plugin=0, unheard_of=0).lomo_backward(1)
"""


def listed(text: str, *, compat: bool = False) -> list[Finding]:
    return findings_of(Script(text), compat=compat)


@pytest.mark.parametrize("compat", [False, True])
def test_the_names_that_scripts_want_are_there(compat: bool) -> None:
    rows = listed(WANTED, compat=compat)
    assert len(rows) > 70
    assert not [row for row in rows if row.status == MISSING]


def test_each_name_that_is_missing_has_what_to_use_instead() -> None:
    rows = listed(LACKING)
    assert rows[-1] == Finding("accelerate.Accelerator", [2], SAME)
    assert {row.status for row in rows[:-1]} == {MISSING}
    assert all(row.what and row.instead for row in rows[:-1])
    assert {row.name for row in rows} >= {
        "accelerate.big_modeling",
        "Accelerator(deepspeed_plugin=)",
        "Accelerator(unheard_of=)",
        "Accelerator.lomo_backward",
    }
    assert len(listed(f"{LACKING}Accelerator().lomo_backward = 0\n")) == len(rows) - 1


def differences(text: str, *, compat: bool = False) -> list[str]:
    return [row.name for row in listed(text, compat=compat) if row.status == DIFFERS]


def test_every_difference_of_a_name_is_listed_whatever_its_arguments_are_called() -> None:
    script = "from accelerate import Accelerator\na = Accelerator()\nx = a.prepare(any_name)\n"
    assert differences(script) == ["Accelerator.prepare"] * 5
    names = [name for difference in DIFFERENCES for name in difference.names]
    uses = "\n".join(f"a.{name.rpartition('.')[2]}" for name in names if "=" not in name)
    imported = "from accelerate import DataLoaderConfiguration, find_executable_batch_size\n"
    imported += imported.replace("import", ".utils import", 1).replace(" .", ".")
    script = script.replace("Accelerator()", "Accelerator(split_batches=True, log_with='x')")
    assert sorted(differences(imported + script + uses)) == sorted(names)


def test_no_difference_is_listed_where_all_imports_become_those_of_compat() -> None:
    script = "from accelerate import Accelerator\na = Accelerator()\na.prepare(x)\n"
    assert differences(script)
    assert not differences(script, compat=True)
    assert not differences("import accelerate\na = accelerate.Accelerator()\na.prepare(x)\n")
    native = "from accelerate.utils import set_seed\n"  # beside a line that headway alone lacks
    assert not differences(native + script.replace("Accelerator\n", "Accelerator, utils\n", 1))


def names(text: str) -> dict[str, list[int]]:
    return {shown(*name): sorted(lines) for name, lines in Script(text).names.items()}


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


def test_attributes_of_what_holds_an_accelerator_and_its_arguments_are_found() -> None:
    script = Script("""\
import accelerate
from accelerate import Accelerator
one = Accelerator(log_with="all", cpu=None, **others)
accelerate.Accelerator(project_dir=".")
self.trainer.one.prepare(sched)
other(deepspeed_plugin=1).reduce(2)
args.use_stateful_dataloader, self.accelerator.reduce(3), accelerate.Accelerator().gather
self.mine: Accelerator = Accelerator(); (two := Accelerator()).free_memory(); two.clear()
self.mine.backward(two.loss)
""")
    assert script.keywords == {"log_with": {3}, "project_dir": {4}}
    found = {"prepare": {5}, "reduce": {7}, "gather": {7}, "clear": {8}, "backward": {9}}
    assert script.attributes == found | {"loss": {9}}


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


def after(text: str, *, compat: bool = False) -> str:
    return with_new_imports(Script(text), compat=compat)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("import accelerate", "import headway.compat as accelerate"),
        ("import accelerate as acc", "import headway.compat as acc"),
        ("é = 1; import accelerate", "é = 1; import headway.compat as accelerate"),
        ("import accelerate.utils", "import headway.compat as accelerate"),
        ("import accelerate.utils as u", "import headway.compat.utils as u"),
        ("import os, accelerate, re", "import os, headway.compat as accelerate, re"),
        ("from accelerate import Accelerator", "from headway import Accelerator"),
        ("from accelerate.utils import set_seed", "from headway.utils import set_seed"),
        (
            "from accelerate.utils.random import set_seed",
            "from headway.compat.utils.random import set_seed",
        ),
        ("from accelerate import utils", "from headway.compat import utils"),
        (  # the missing name is an error that says what to use instead, wherever it is imported
            "from accelerate import Accelerator, DeepSpeedPlugin",
            "from headway import Accelerator, DeepSpeedPlugin",
        ),
        (
            "from accelerate.scheduler import AcceleratedScheduler",
            "from headway.compat.scheduler import AcceleratedScheduler",
        ),
        ("from accelerate.big_modeling import x", "from headway.compat.big_modeling import x"),
    ],
)
def test_each_form_of_import_is_changed(before: str, expected: str) -> None:
    assert after(before) == expected
    assert after(expected) == expected


def test_all_imports_can_be_those_of_compat() -> None:
    text = "from accelerate import Accelerator\nfrom accelerate.utils import set_seed\n"
    assert after(text, compat=True) == text.replace("accelerate", "headway.compat")


def test_comments_line_endings_and_formatting_stay() -> None:
    before = (
        "# accelerate\r\n"
        "é = 'from accelerate import x'; from accelerate import (  Accelerator,  # why\r\n"
        "    )  ; z = (1,\r\n"
        "  2)\r\n"
        "\tif_ = 1\r\n".replace("\t", "")
        + "if é:\r\n"
        "\tfrom   accelerate . utils   import  set_seed ,\\\r\n"
        "\t\tgather\r\n"
        "def f():\r\n"
        "    from accelerate \\\r\n"
        "        .utils import reduce  # no line end"
    )
    expected = (
        before.replace("from accelerate import (", "from headway import (")
        .replace("accelerate . utils", "headway.utils")
        .replace("accelerate \\\r\n        .utils", "headway.utils")
    )
    assert after(before) == expected


@pytest.mark.parametrize("form", ["from {} import a_name", "import {} as a_module"])
def test_the_modules_in_rewritten_imports_exist(form: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    modules = [
        package.name
        for package in walk_packages(accelerate.__path__, "accelerate.", lambda _: None)
    ]
    assert len(modules) > 50
    for module in modules:
        written = after(form.format(module)).split()[1]
        assert find_spec(written) is not None, (module, written)
