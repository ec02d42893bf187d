"""Each name that a script uses is listed once, or with every difference that is known of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from headway.migration.scripts import DIFFERENCES, DIFFERS, MISSING, SAME, Row, Script, rows_of

WANTED = Path(__file__).with_name("wanted.txt").read_text()
"""What public scripts take from Accelerate most often."""
LACKING = """
from accelerate import Accelerator, DeepSpeedPlugin, init_empty_weights, prepare_pippy
from accelerate.utils import BnbQuantizationConfig, MegatronLMPlugin, SageMakerDistributedType
import accelerate.big_modeling
Accelerator(deepspeed_plugin=0, unheard_of=0).lomo_backward(1)
"""


def listed(text: str, *, compat: bool = False) -> list[Row]:
    return rows_of(Script(text), compat=compat)


@pytest.mark.parametrize("compat", [False, True])
def test_the_names_that_scripts_want_are_there(compat: bool) -> None:
    rows = listed(WANTED, compat=compat)
    assert len(rows) > 70
    assert not [row for row in rows if row.status == MISSING]


def test_each_name_that_is_missing_has_what_to_use_instead() -> None:
    rows = listed(LACKING)
    assert rows[-1] == Row("accelerate.Accelerator", [2], SAME)
    assert {row.status for row in rows[:-1]} == {MISSING}
    assert all(row.what and row.instead for row in rows[:-1])
    assert {row.name for row in rows} >= {
        "accelerate.big_modeling",
        "Accelerator(deepspeed_plugin=)",
        "Accelerator(unheard_of=)",
        "Accelerator.lomo_backward",
    }


def differences(text: str, *, compat: bool = False) -> list[str]:
    return [row.name for row in listed(text, compat=compat) if row.status == DIFFERS]


def test_every_difference_of_a_name_is_listed_whatever_its_arguments_are_called() -> None:
    script = "from accelerate import Accelerator\na = Accelerator()\nx = a.prepare(any_name)\n"
    assert differences(script) == ["Accelerator.prepare"] * 4
    names = [one.name for one in DIFFERENCES]
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
