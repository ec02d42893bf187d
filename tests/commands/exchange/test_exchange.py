"""`headway config import`, and what profiles and variables have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.commands.main import main
from headway.settings.layers import environment_layer, profile_layers
from headway.settings.resolve import resolve
from headway.settings.table import TABLE
from tests.machines.recorded import load

EVERYTHING = """
device=cuda devices=1,3 num_processes=2 mixed_precision=bf16 gradient_accumulation_steps=4
threads_per_process=3 num_machines=2 machine_rank=1 main_address=node0 main_port=29501
max_restarts=2 grace_period_s=60 hang_timeout=600 log_dir=/tmp/logs ranks=0-1,3 start_method=exec
"""


def test_a_variable_means_what_the_key_of_a_profile_means() -> None:
    machine = load("gpu_8_h100")
    words = [*EVERYTHING.split(), "env=A=1 B='two words' 'A B=x'"]
    assert main(["config", "set", *words]) == 0
    pairs = (word.split("=", 1) for word in words)
    variables = {TABLE[key].variable: text for key, text in pairs}
    sources = profile_layers(), [environment_layer(variables)]
    one, other = (resolve(layers, machine, {}).values for layers in sources)
    assert {name: one[name].value for name in one} == {name: other[name].value for name in other}
    assert one["env"].value == {"A": "1", "B": "two words", "A B": "x"}


def test_an_accelerate_file_of_more_than_memory_holds_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bomb = "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    for text, reason in (("a0: &a0 [x]\n" + bomb, "anchors"), ("[" * 100_000, "nest")):
        Path("its.yaml").write_text(text)
        assert main(["config", "import", "its.yaml"]) == 2
        assert reason in capsys.readouterr().err
