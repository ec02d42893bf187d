"""One order of the sources, with no exception, and an origin for every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.ipc.origin import Layer, Origin
from headway.machine.facts import Gpu, Machine
from headway.settings.profile import Entry
from headway.settings.resolve import environment_layer, profile_layers, resolve
from headway.settings.setting import AUTO, MachineCount
from headway.settings.table import TABLE, Settings

CPU = Machine(cores=8, cores_reason="8 usable cores")
H100 = Gpu("NVIDIA H100", "GPU-0", 80 * 2**30, (9, 0))
SERVER = Machine(
    cores=64,
    cores_reason="64 usable cores",
    gpus=tuple(H100._replace(uuid=f"GPU-{i}") for i in range(8)),
)

LAUNCH_LAYERS = [layer for layer in Layer if Layer.DETECTED < layer <= Layer.FLAG]


def layer(name: Layer, **values: str) -> Mapping[str, Entry]:
    return {
        key: Entry(raw, Origin(name, reason=f"{name.label} {key}")) for key, raw in values.items()
    }


def settled(*layers: Mapping[str, Entry], machine: Machine = CPU, **environ: str) -> Settings:
    return resolve(list(layers), machine, environ)


def two_values(name: str) -> Sequence[str]:
    """Return two different values of a setting."""
    row = TABLE[name]
    if row.choices:
        return [word for word in row.choices if word != AUTO][:2]
    if row.shape == "map":
        return ["aa=1", "aa=2"]
    return ["20", "30"] if row.accepts("20") else ["2h", "3h"]


@hypothesis.settings(max_examples=25)
@given(st.sets(st.sampled_from(LAUNCH_LAYERS), min_size=1), st.data())
def test_the_strongest_source_wins_for_every_setting(
    sources: set[Layer], data: st.DataObject
) -> None:
    for name in TABLE:
        said = {source: data.draw(st.sampled_from(two_values(name))) for source in sorted(sources)}
        settings = settled(
            *(layer(source, **{name: raw}) for source, raw in said.items()), machine=SERVER
        )
        strongest = max(sources)
        assert settings.values[name].value == TABLE[name].parse(said[strongest])
        assert settings.origin(name).layer is strongest


def test_every_value_has_an_origin_in_words() -> None:
    assert all(str(value.origin) for value in settled().values.values())


def test_auto_in_a_profile_overrides_a_weaker_value_and_names_the_profile() -> None:
    settings = settled(
        layer(Layer.USER_PROFILE, num_processes="4"),
        layer(Layer.PROJECT_PROFILE, num_processes="auto"),
    )
    assert settings.num_processes == 1
    assert "project profile num_processes" in str(settings.origin("num_processes"))


def test_threads_are_the_usable_cores_divided_by_the_processes() -> None:
    assert settled(layer(Layer.FLAG, num_processes="3")).threads_per_process == 2
    assert settled(layer(Layer.FLAG, num_processes="64")).threads_per_process == 1


def test_explicit_threads_beat_omp_num_threads_which_beats_what_we_compute() -> None:
    computed = settled(OMP_NUM_THREADS="5,2")
    assert computed.threads_per_process == 5
    assert "OMP_NUM_THREADS=5,2" in str(computed.origin("threads_per_process"))
    explicit = settled(layer(Layer.USER_PROFILE, threads_per_process="3"), OMP_NUM_THREADS="5")
    assert explicit.threads_per_process == 3
    assert settled(OMP_NUM_THREADS="many").threads_per_process == 8


def test_env_grows_from_source_to_source_and_each_name_is_overridden_alone() -> None:
    settings = settled(layer(Layer.USER_PROFILE, env="A=1 B=2"), layer(Layer.FLAG, env="B=3"))
    assert settings.env == {"A": "1", "B": "3"}
    assert "user profile" in str(settings.origin("env"))
    assert "flag" in str(settings.origin("env"))


def test_all_problems_are_reported_at_once_with_their_places() -> None:
    with pytest.raises(ConfigError) as caught:
        settled(
            layer(Layer.USER_PROFILE, devise="cpu", num_processes="four"),
            layer(Layer.FLAG, mixed_precision="bf61"),
        )
    problems = caught.value.problems
    assert [problem.where for problem in problems] == [
        "user profile devise",
        "user profile num_processes",
        "flag mixed_precision",
    ]
    assert "did you mean 'device'?" in problems[0].what
    assert problems[2].what.endswith("; did you mean 'bf16'?")
    assert problems[2].fix == "pass `--mixed-precision bf16` (or no, fp16)"


def test_an_unknown_headway_variable_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"HEADWAY_NUM_PROCESES.*did you mean.*NUM_PROCESSES"):
        resolve([environment_layer({"HEADWAY_NUM_PROCESES": "2"})], CPU, {})


@pytest.mark.parametrize("service", ["HEADWAY", "HEADWAY_UI"])
def test_the_variables_of_a_kubernetes_service_are_no_settings(service: str) -> None:
    ends = ("SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR")
    environ = {f"{service}_{end}": "tcp://10.96.3.4:80" for end in ends}
    told = {f"{service}_SERVICE_HOST": "10.96.3.4", "HEADWAY_MAIN_PORT": "1", "HEADWAY_PROT": "1"}
    assert environment_layer({**environ, **told}).keys() == {"main_port", "HEADWAY_PROT"}
    assert environment_layer(environ).keys() == environ.keys()  # there is no such Service


def test_the_contract_of_an_outer_launch_is_no_setting_of_an_inner_one() -> None:
    assert environment_layer(
        {"HEADWAY_RUN": "{}", "HEADWAY_DEVICE": "cpu", "HOME": "/"}
    ).keys() == {"device"}


def test_the_project_profile_is_found_upward_and_beats_the_user_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config" / "headway"
    config.mkdir(parents=True)
    (config / "default.yaml").write_text("device: cuda\nnum_processes: 2\n")
    project = Path.cwd()
    (project / "headway.yaml").write_text("device: cpu\n")
    (project / "src").mkdir()
    monkeypatch.chdir("src")
    settings = resolve(profile_layers({"XDG_CONFIG_HOME": str(tmp_path / "config")}), CPU, {})
    assert (settings.device, settings.num_processes) == ("cpu", 2)
    assert str(settings.origin("device")).endswith("work/headway.yaml, line 1")
    (tmp_path / "headway.yaml").write_text("device: cuda\n")  # above HOME, where the search ends
    (project / "headway.yaml").unlink()
    assert profile_layers({"XDG_CONFIG_HOME": str(tmp_path)}) == []


@pytest.mark.parametrize("source", [Layer.FLAG, Layer.ENVIRONMENT, Layer.PROFILE])
def test_the_value_in_a_fix_is_one_that_does_no_harm_and_no_value_is_another_way(
    source: Layer,
) -> None:
    with pytest.raises(ConfigError) as refused:
        settled(layer(source, hang_timeout="0"))
    (problem,) = refused.value.problems
    assert problem.fix in (
        "pass `--hang-timeout 600`, or omit it",
        "`export HEADWAY_HANG_TIMEOUT=600`, or unset it",
        "write `hang_timeout: 600`, or remove it",
    )


@pytest.mark.parametrize(
    ("variable", "close"),
    [("HEADWAY_NUM_PROC", "HEADWAY_NUM_PROCESSES"), ("HEADWAY_CPU", ""), ("HEADWAY_NPROC", "")],
)
def test_a_variable_is_no_typo_of_another_because_both_begin_alike(
    variable: str, close: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        settled(environment_layer({variable: "1"}))
    assert refused.value.problems[0].what.partition("did you mean ")[2].strip("'?") == close


@pytest.mark.parametrize(
    ("text", "least", "most"), [("4", 4, 4), ("2:4", 2, 4), (" 1 : 2 ", 1, 2), ("3:3", 3, 3)]
)
def test_a_number_of_machines_may_be_a_range(text: str, least: int, most: int) -> None:
    found = MachineCount(1)(text)
    assert (found.least, int(found)) == (least, most)
    assert MachineCount(1)(str(found)) == found
    assert (found == most) == (least == most)


@pytest.mark.parametrize("text", ["0", "4:2", "2:", ":3", "0:2", "a:b", "1:2:3"])
def test_an_impossible_range_of_machines_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a number|descending|must be"):
        MachineCount(1)(text)
