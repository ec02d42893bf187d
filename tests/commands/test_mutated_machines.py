"""Snapshots of machines to which something has happened: refused with the key, or a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.commands.running import run
from tests.machines.recorded import FOLDER, RECORDINGS, changed

VALUES: list[Any] = [
    *(None, True, 0, 1, -1, 0.5, 7, 2**63, 10**400, float("inf"), float("nan")),
    *("", "0", "x", "9" * 5000, "13.0", "\ud800", "é🦊", "a\nb", "GPU-0", "0,-1,1", "Darwin"),
    *([], {}, [1], [[]], {"a": 1}, [None]),
]


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return every object or list below `data` with each of its keys or indices."""
    keys: list[Any] = list(data) if isinstance(data, dict) else list(range(len(data)))
    found: list[tuple[Any, Any]] = [(data, key) for key in keys]
    for key in keys:
        if isinstance(data[key], (dict, list)):
            found += places(data[key])
    return found


@st.composite
def mutated(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(sorted(RECORDINGS)))
    data = json.loads((FOLDER / f"{name}.json").read_text())
    whole, key = draw(st.sampled_from(places(data)))
    if draw(st.booleans()):
        whole[key] = draw(st.sampled_from(VALUES))
    else:
        del whole[key]
    text = json.dumps(data)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example('{"version": 1, "cores": ' + "9" * 5000 + "}")
@example(json.dumps(changed("gpu_4", "driver", "9" * 5000)))
@example(json.dumps(changed("gpu_4", "cuda_visible_devices", "9" * 5000)))
@example(json.dumps(changed("gpu_4", "host.shm_bytes", 10**400)))
@example(json.dumps(changed("gpu_4", "host.cpu_quota", 10**400)))
@given(mutated())
def test_a_mutated_snapshot_is_a_machine_or_refused_with_file_and_key(text: str) -> None:
    Path("mutated.json").write_text(text)
    Path("train.py").touch()
    for words in (["doctor"], ["launch", "--dry-run", "train.py"]):
        code, said = run(words[0], "--machine", "mutated.json", *words[1:])
        assert code in (0, 1, 2, 3)
        if code > 1:
            assert "\n  from: " in said
            assert "\n  fix:  " in said
