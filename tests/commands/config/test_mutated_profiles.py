"""Profiles to which something has happened: no traceback, no silent change."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.ipc.origin import Layer
from headway.settings.profile import parse_profile
from headway.settings.setting import Raw
from tests.commands.running import run

PROFILE = """\
# yaml-language-server: $schema=schema.json
version: 1
device: cuda   # the big ones
devices: [1, 3]
num_processes: 2
mixed_precision: "no"
env:
  NCCL_DEBUG: INFO
  PATH_TO: 'two words'
log_dir: logs/run 1
max_restarts: 3
"""

PIECES = st.sampled_from(
    [
        *(":", ": ", "- ", "? ", "#", " #", "'", '"', "|", ">", "|\n", "%", "@", "`", "\\", ","),
        *("{", "}", "[", "]", "{}", "[]", "&a ", "*a", "!!int ", "!x ", "<<: ", "---\n", "...\n"),
        *("\n", "\n\n", "\r\n", "\r", "\t", " ", "  ", "\0", "\ufeff", "\x85", "\u2028", "é", "🦊"),
        *("no", "null", "~", "0", "-1", "1e3", "0x10", "9" * 20, "auto", "device", "env: ", "a: b"),
        *("device: cpu\n", "devcie: cpu\n", "version: 2\n", "machine_rank: 5\n", "env: {A: 1}\n"),
    ]
)
PLACES = st.integers(0, len(PROFILE))


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = PROFILE
    for _ in range(draw(st.integers(1, 2))):
        start = draw(PLACES)
        length = draw(st.sampled_from([0, 0, 1, 3, 20]))
        text = text[:start] + draw(PIECES | st.just("")) + text[start + length :]
    lines = text.splitlines(keepends=True)
    if draw(st.booleans()):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(lines)))
    return "".join(lines)


def meaning(text: str) -> Any:
    """What any other YAML reader finds, every scalar as the text that stands there."""
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    found = yaml.load(text.removeprefix("\ufeff"), Loader=loader)
    found.pop("version", None)
    return found


def read(text: str) -> dict[str, Raw]:
    entries = parse_profile(text.removeprefix("\ufeff"), "p", Layer.PROFILE)
    if faults := [fault for entry in entries.values() for fault in entry.problems]:
        raise ConfigError.of(faults)
    return {name: entry.raw for name, entry in entries.items()}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("device: cpu\n# a comment\nenv: {}\n")
@given(mutated())
def test_a_mutated_profile_is_refused_with_its_place_or_means_what_it_says(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "mutated.yaml")
        Path(path).write_bytes(text.encode())
        code, said = run("config", "validate", path)
        assert code in (0, 1)
        if code == 1:
            assert "mutated.yaml" in said
            assert "\n  fix:  " in said
            return
        before = meaning(text)
        assert read(text) == before
        code, said = run("config", "set", "--profile", path, "max_restarts=7", "env.NEW=x y")
        after = meaning(Path(path).read_bytes().decode())
        if code == 0:
            env = before.get("env", {})
            expected = {**before, "max_restarts": "7"}
            if isinstance(env, dict):
                assert after.pop("env") == {**env, "NEW": "x y"}
                expected.pop("env", None)
            assert after == expected
        else:
            assert "cannot change" in said
            assert after == before


def test_the_unmutated_profile_is_sound() -> None:
    Path("good.yaml").write_text(PROFILE)
    assert run("config", "validate", "good.yaml") == (0, "good.yaml: ok\n")


def test_every_beginning_of_a_profile_is_refused_or_means_what_it_says() -> None:
    for length in range(len(PROFILE)):
        with contextlib.suppress(ConfigError):
            entries = read(PROFILE[:length])
            assert entries == meaning(PROFILE[:length])
