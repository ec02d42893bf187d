"""Two hundred snapshots to which something has happened: used, or refused with file and key."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.commands.running import run
from tests.machines.recorded import FOLDER, RECORDINGS, changed

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 0.5, -0.5, 7, 2**31, 2**63 - 1, 2**63, 10**400),
    *(float("inf"), float("-inf"), float("nan")),
    *("", "0", "-1", "x", "9" * 5000, "13.0", "1.12", "\ud800", "\udcff", "é🦊", "a\nb", "\0"),
    *("GPU-0", "0,1,", "0,-1,1", "maybe", "idle:2", "Darwin"),
    *([], {}, [1], [[]], {"a": 1}, {"a": "b"}, [None]),
]
NAMES = st.sampled_from(["cores", "gpus", "name", "uuid", "variables", "RANK", "no such"])
Place = tuple[Any, Any]
"""An object or a list of a snapshot, and a key or an index in it."""


def places(data: Any) -> list[Place]:
    """Return every place below `data`."""
    keys: list[Any] = list(data) if isinstance(data, dict) else list(range(len(data)))
    found: list[Place] = [(data, key) for key in keys]
    for key in keys:
        if isinstance(data[key], (dict, list)):
            found += places(data[key])
    return found


@st.composite
def mutated(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(sorted(RECORDINGS)))
    data = json.loads((FOLDER / f"{name}.json").read_text())
    for _ in range(draw(st.integers(1, 3))):
        whole, key = draw(st.sampled_from(places(data)))
        value = copy.deepcopy(draw(st.sampled_from(VALUES)))
        how = draw(st.sampled_from(["replace", "replace alike", "remove", "add", "repeat"]))
        if how == "replace":
            whole[key] = value
        elif how == "replace alike":
            alike = [value for value in VALUES if type(value) is type(whole[key])]
            whole[key] = copy.deepcopy(draw(st.sampled_from(alike)))
        elif how == "remove":
            del whole[key]
        elif isinstance(whole, list):
            whole.append(value if how == "add" else copy.deepcopy(whole[key]))
        else:
            whole[draw(NAMES)] = value if how == "add" else copy.deepcopy(whole[key])
        if not data:
            break
    text = json.dumps(data)
    if draw(st.integers(0, 9)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    return text


@pytest.mark.slow
@pytest.mark.wording
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example('{"version": 1, "cores": ' + "9" * 5000 + "}")
@example(json.dumps(changed("gpu_4", "driver", "9" * 5000)))
@example(json.dumps(changed("gpu_4", "cuda_visible_devices", "9" * 5000)))
@example(json.dumps(changed("gpu_4", "host.shm_bytes", 10**400)))
@example(json.dumps(changed("gpu_4", "host.cpu_quota", 10**400)))
@given(mutated())
def test_a_mutated_snapshot_is_a_machine_or_refused_with_file_and_key(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "mutated.json")
        Path(path).write_text(text)
        Path(folder, "train.py").touch()
        doctor, said = run("doctor", "--machine", path)
        as_json, _ = run("doctor", "--machine", path, "--json")
        assert doctor == as_json
        if doctor == 2:
            assert f"from: flag --machine, {path}" in said
            assert "\n  fix:  " in said
        code, plan = run("launch", "--machine", path, "--dry-run", f"{folder}/train.py")
        assert code in (0, 2, 3)
        if code:
            assert "\n  from: " in plan
            assert "\n  fix:  " in plan
