"""Imports of Accelerate become Headway's; everything else in a script stays as it is."""

from __future__ import annotations

from importlib.util import find_spec
from pkgutil import walk_packages

import pytest

from headway.migration.scripts import Script, rewritten

pytest.importorskip("torch")


def after(text: str, *, compat: bool = False) -> str:
    return rewritten(Script(text), compat=compat)


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
        one.name for one in walk_packages(accelerate.__path__, "accelerate.", lambda _: None)
    ]
    assert len(modules) > 50
    for module in modules:
        written = after(form.format(module)).split()[1]
        assert find_spec(written) is not None, (module, written)
