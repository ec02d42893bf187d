"""benchmarks/names.py counts what scripts need and which of it is there."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch")

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "names.py"

SCRIPTS = {
    "a.py": "from accelerate import Accelerator, DeepSpeedPlugin\nAccelerator().print()\n",
    "b.py": "from accelerate import Accelerator\nAccelerator().lomo_backward(1, 2)\n",
    "c.py": "from accelerate import Accelerator\nAccelerator(cpu=True).print()\n",
    "sub/d.py": "from accelerate import DeepSpeedPlugin, Accelerator\nAccelerator().unheard_of\n",
    "other.py": "import torch\n",
    ".hidden/e.py": "import accelerate\n",
    "broken.py": "import accelerate\nprint 'Python 2'\n",
}


def test_the_most_wanted_missing_name_comes_first_with_what_it_would_complete(
    tmp_path: Path,
) -> None:
    for name, text in SCRIPTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = runpy.run_path(str(BENCHMARK))["count"]([str(tmp_path)])
    assert (found.num_files, found.num_complete) == (4, 1)
    missing = [tuple(row) for row in found.rows if row.status in ("refused", "not there")]
    assert missing == [
        ("accelerate.DeepSpeedPlugin", "refused", 2, 2),
        ("Accelerator.lomo_backward", "refused", 1, 3),
        ("Accelerator.unheard_of", "not there", 1, 4),
    ]
    assert [row.need for row in found.rows[:1]] == ["accelerate.Accelerator"]
    assert [text for text in found.unread if "broken.py, line 2" in text]
