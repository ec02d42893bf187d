"""`headway config set`, `unset`, `use`, `validate`, `list`, `path`, `schema`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headway.commands.config import check as config_check
from headway.commands.config import edit as config_edit
from headway.commands.main import main
from headway.settings.profile_files import choose_profile
from headway.settings.table import TABLE
from tests.commands.conftest import PROFILE
from tests.machines.recorded import load


def lines(stream: str) -> list[str]:
    return [line.strip() for line in stream.splitlines()]


def test_set_changes_the_keys_named_and_prints_what_was(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", "num_processes=4", "env.B=two words", "max_restarts=1"]) == 0
    assert profile.read_text() == PROFILE.replace("s: 2", "s: 4").replace(
        "{A: 1}", '{A: 1, B: "two words"}\nmax_restarts: 1'
    )
    out = capsys.readouterr().out
    assert "num_processes: 4  (was 2)" in out
    assert "max_restarts: 1\n" in out


def test_set_begins_a_profile_where_there_is_none_and_editors_find_the_schema() -> None:
    assert main(["config", "set", "--profile", "gpu4", "device=cuda", "devices=0-", "env=A=1"]) == 2
    assert main(["config", "set", "--profile", "gpu4", "device=cuda", "env=A=1 B=2"]) == 0
    path = Path(choose_profile("gpu4").path)
    first, *rest = path.read_text().splitlines()
    assert first == "# yaml-language-server: $schema=schema.json"
    assert rest == ["version: 1", "device: cuda", "env: {A: 1, B: 2}"]
    schema = json.loads((path.parent / "schema.json").read_text())
    assert schema["properties"].keys() == {"version", *TABLE}
    assert main(["config", "set", "--profile", "headway.yaml", "device=cpu"]) == 0
    schema_path = path.parent / "schema.json"  # whole: editors know no ~
    assert f"$schema={schema_path}\n" in Path("headway.yaml").read_text()


def test_set_refuses_all_mistakes_at_once_and_changes_nothing(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["devise=cpu", "num_processes=0", "mixed_precision", "device=cpu", "device=cuda"]
    assert main(["config", "set", *words]) == 2
    err = capsys.readouterr().err
    for part in ("did you mean 'device'?", "1 or more", "is not KEY=VALUE", "device is set twice"):
        assert part in err
    assert main(["config", "set", "devices=0,1"]) == 2  # the profile says device: cpu
    assert "which selects GPUs" in capsys.readouterr().err
    assert profile.read_text() == PROFILE


@pytest.mark.wording
def test_set_says_when_this_machine_cannot_or_another_source_wins(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("headway.yaml").write_text("num_processes: 3\n")
    monkeypatch.setenv("HEADWAY_MAX_RESTARTS", "5")
    assert main(["config", "set", "device=cuda", "num_processes=8", "max_restarts=1"]) == 0
    notes = lines(capsys.readouterr().err)
    assert len(notes) == 3
    assert "is overridden by project profile" in notes[0]
    assert "is overridden by environment HEADWAY_MAX_RESTARTS" in notes[1]
    assert "no GPU is visible" in notes[2]
    assert "device: cuda " in profile.read_text()


def test_unset_removes_keys_and_refuses_what_is_not_there(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "unset", "num_processes", "env.A"]) == 0
    assert profile.read_text() == "# for the big machine\ndevice: cpu   # not the GPU\n"
    assert "num_processes: removed  (was 2)" in capsys.readouterr().out
    assert main(["config", "unset", "num_processes"]) == 2
    assert "'num_processes' is not set" in capsys.readouterr().err
    assert main(["config", "unset", "device.x"]) == 2
    assert main(["config", "unset", "--profile", "gone", "device"]) == 2


@pytest.mark.wording
def test_unset_says_who_sets_the_key_now(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_DEVICE", "auto")
    assert main(["config", "unset", "device", "num_processes"]) == 0
    note = "headway: note: device is still set, to auto: environment HEADWAY_DEVICE"
    assert capsys.readouterr().err.splitlines() == [note]
    monkeypatch.setenv("HEADWAY_ENV", "A=2 C=3")
    assert main(["config", "unset", "env.A"]) == 0
    note = "headway: note: env.A is still set, to 2: environment HEADWAY_ENV"
    assert note in capsys.readouterr().err.splitlines()


def test_an_env_that_cannot_be_read_may_be_removed(profile: Path) -> None:
    profile.write_text("env: 5\ndevice: cpu\n")
    assert main(["config", "unset", "env"]) == 0
    assert profile.read_text() == "device: cpu\n"


@pytest.mark.parametrize("words", [["set", "env.B=1"], ["unset", "env.B"]])
def test_an_env_that_cannot_be_read_is_refused_before_it_is_changed(
    words: list[str], profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write_text("env: A\n")
    assert main(["config", *words]) == 2
    assert "env is 'A', in which word 1 is not NAME=VALUE" in capsys.readouterr().err
    assert profile.read_text() == "env: A\n"


@pytest.mark.wording
def test_use_selects_a_profile_until_default_is_used_again(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "use", "gpu4"]) == 2
    assert "profile 'gpu4' does not exist" in capsys.readouterr().err
    main(["config", "set", "--profile", "gpu4", "mixed_precision=bf16"])
    assert main(["config", "use", "gpu4"]) == 0
    main(["config", "path"])
    assert capsys.readouterr().out.endswith("/headway/gpu4.yaml\n")
    main(["config", "list"])
    default, gpu4 = capsys.readouterr().out.splitlines()
    assert default.split()[0] == "default"
    assert gpu4.split()[:2] == ["*", "gpu4"]
    assert "mixed_precision bf16" in gpu4
    Path(choose_profile("gpu4").path).unlink()
    assert main(["launch", "--dry-run", "-m", "this"]) == 2
    assert "from: ~/.config/headway/selected" in capsys.readouterr().err
    assert main(["config", "use", "default"]) == 0
    assert choose_profile().chosen_by == ""


@pytest.mark.parametrize("kind", ["a folder", "a broken profile"])
def test_use_takes_only_what_a_launch_could_read(
    kind: str, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write_text("device: [\n")
    assert main(["config", "use", str(profile if "broken" in kind else profile.parent)]) == 2
    assert "fix:" in capsys.readouterr().err
    assert choose_profile().chosen_by == ""


def test_a_selection_that_cannot_be_removed_is_no_traceback(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.with_name("selected").mkdir()
    assert main(["config", "use", "default"]) == 2
    assert "the selection cannot be removed" in capsys.readouterr().err


def test_what_is_set_already_is_not_said_to_be_written(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", "num_processes=2"]) == 0
    assert capsys.readouterr().out == "unchanged: ~/.config/headway/default.yaml\n"


@pytest.mark.wording
def test_a_value_that_is_no_text_is_refused_as_what_it_is(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", "env.A=\udcff", "num_processes=abc"]) == 2
    err = capsys.readouterr().err
    assert "is not UTF-8" in err
    assert "fix:  write num_processes=auto" in err
    assert profile.read_text() == PROFILE


def test_a_damaged_selection_is_mended_by_selecting_again(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.with_name("selected").write_text("no such name!\n")
    assert main(["config", "show"]) == 2
    assert "`headway config use default` selects the default" in capsys.readouterr().err
    assert main(["config", "use", "default"]) == 0
    assert main(["config", "show"]) == 0


def test_validate_checks_files_for_every_machine_and_ends_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("gpu.yaml").write_text("devices: 0,1\nmixed_precision: fp16\nnum_processes: 2\n")
    assert main(["config", "validate", "gpu.yaml"]) == 0  # there is no GPU here, and need be none
    assert capsys.readouterr().out == "gpu.yaml: ok\n"
    Path("bad.yaml").write_text("device: cpu\nmixed_precision: fp16\nmachine_rank: 2\n")
    assert main(["config", "validate", "gpu.yaml", "bad.yaml"]) == 1
    err = capsys.readouterr().err
    assert "line 2, column 1" in err
    assert "line 3, column 1" in err
    assert main(["config", "validate", "missing.yaml"]) == 1
    assert main(["config", "validate"]) == 2
    assert "no profile to check" in capsys.readouterr().err


ALL_WRONG = """\
num_procesess: 2
device: cpu
mixed_precision: fp16
max_restarts: many
device: cuda
num_machines: 2
main_adress: node0
machine_rank: 5
env: {RANK: 1, A: }
debug_rank:
"""


@pytest.mark.wording
@pytest.mark.parametrize("words", [["config", "validate"], ["launch", "--dry-run", "-m", "this"]])
def test_mistakes_of_every_kind_are_named_at_once_each_with_its_place(
    words: list[str], profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write_text(ALL_WRONG)
    assert main(words) in (1, 2)
    err = capsys.readouterr().err.split("error: ")[1:]
    found = {one.partition("\n")[0]: one.count("\n  fix:  ") for one in err}
    assert found == dict.fromkeys(
        [
            "unknown setting 'num_procesess'; did you mean 'num_processes'?",
            "duplicate key 'device'; first defined in line 2",
            "max_restarts is 'many', which is not a whole number",
            "unknown setting 'main_adress'; did you mean 'main_address'?",
            "env.A has no value",
            "debug_rank has no value",
            "machine_rank is 5, but num_machines is 2: the ranks are 0 to 1",
        ],
        1,
    )
    lines = [int(one.partition(", line ")[2].partition(",")[0]) for one in err]
    assert lines == [1, 5, 4, 7, 9, 10, 8]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ranks: [0, 7]\n", None),  # a machine with eight GPUs has rank 7
        ("ranks: [0, 7]\nnum_processes: 4\n", "ranks contains rank 7, but ranks are 0 to 3"),
        ("debug_rank: 0\nnum_machines: 2\nmain_address: a\nnum_processes: 2\n", "debug_rank is 0"),
        ("device: gpu\ndevices: 0-3\n", None),
        ("device: mps\ndevices: 0-3\n", "which selects GPUs, but device is 'mps'"),
        ("hang_timeout: 0\n", "hang_timeout is '0', but it must be 1 or more"),
        ("mps_fallback: off\n", "but it must be one of on, strict"),
        ("device: mps\nnum_processes: 2\n", "MPS supports only one process"),
        ("device: gpu\nnum_processes: 2\n", None),
    ],
)
@pytest.mark.parametrize("here", ["laptop_cpu", "gpu_1", "mac_m2"])
def test_validate_knows_what_can_be_on_some_machine(
    text: str,
    reason: str | None,
    here: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config_check, "detect_machine", lambda: load(here))
    Path("some.yaml").write_text(text)
    assert main(["config", "validate", "some.yaml"]) == (0 if reason is None else 1)
    assert (reason or "") in capsys.readouterr().err


def test_validate_without_files_checks_what_a_launch_here_would_read(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("headway.yaml").write_text("device: gpus\n")
    assert main(["config", "validate"]) == 1
    streams = capsys.readouterr()
    assert "default.yaml: ok" in streams.out
    assert "headway.yaml, line 1, column 1" in streams.err
    Path("headway.yaml").write_text("devices: 0,1\n")  # sound alone, but the user says cpu
    assert main(["config", "validate"]) == 1
    streams = capsys.readouterr()
    assert "headway.yaml: ok" in streams.out
    assert "which selects GPUs, but device is 'cpu'" in streams.err


def test_idle_gpus_are_sought_by_a_launch_and_not_when_a_profile_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_edit, "detect_machine", lambda: load("gpu_2_one_busy"))
    assert main(["config", "set", "device=gpu", "devices=idle:2"]) == 0
    assert not capsys.readouterr().err
    assert main(["config", "set", "devices=idle:3"]) == 0
    assert "only 2 of 2 GPUs are idle" in capsys.readouterr().err


@pytest.mark.wording
def test_launch_takes_a_profile_by_flag_or_variable_and_says_what_overrules_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["config", "set", "--profile", "two", "num_processes=2", "device=cpu"])
    monkeypatch.setenv("HEADWAY_PROFILE", "two")
    assert main(["launch", "--dry-run", "-m", "this"]) == 0
    assert "2 processes on cpu" in capsys.readouterr().out
    monkeypatch.delenv("HEADWAY_PROFILE")
    Path("headway.yaml").write_text("num_processes: 3\n")
    assert main(["launch", "--profile", "two", "--dry-run", "-m", "this"]) == 0
    out = capsys.readouterr().out
    assert "3 processes on cpu" in out
    assert "note: num_processes of user profile ~/.config/headway/two.yaml, line 4" in out
    assert main(["launch", "--profile", "tow", "--dry-run", "-m", "this"]) == 2
    assert "did you mean 'two'?" in capsys.readouterr().err


@pytest.mark.wording
def test_a_key_and_a_value_as_two_words_are_told_the_one_word_to_write(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "set", "num_processes", "2", "env.A", "1"]) == 2
    fixes = [line.strip() for line in lines(capsys.readouterr().err) if line.startswith("fix")]
    assert fixes == ["fix:  write num_processes=2", "fix:  write env.A=1"]


def test_the_schema_takes_what_the_table_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    properties = json.loads(capsys.readouterr().out)["properties"]
    for name, row in TABLE.items():
        assert properties[name]["description"] == row.help
        assert set(properties[name].get("enum", [])) == set(row.choices)
    assert properties["main_port"]["anyOf"][0] == {
        "type": "integer", "minimum": 1, "maximum": 65535,
    }  # fmt: skip
    assert properties["max_restarts"] == {
        "description": TABLE["max_restarts"].help, "type": "integer", "minimum": 0, "default": 0,
    }  # fmt: skip
    number, duration = properties["hang_timeout"]["anyOf"]  # 600, 10m
    assert number == {"type": "integer", "minimum": 1}
    assert re.fullmatch(duration["pattern"], "10m")
    for name in ("devices", "ranks"):  # 3, "0-3", [0, "2-3"]
        one, several = properties[name]["anyOf"]
        assert one == several["items"] == {"type": ["integer", "string"]}


def test_unset_names_all_that_it_cannot_remove(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write_text("version: 1\n" + PROFILE)
    assert main(["config", "unset", "version", "num_proceses", "devise"]) == 2
    err = capsys.readouterr().err
    assert "version cannot be removed" in err
    assert "did you mean 'num_processes'?" in err
    assert "did you mean 'device'?" in err
    assert profile.read_text() == "version: 1\n" + PROFILE


@pytest.mark.wording
@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("num_machinse", "unknown setting 'num_machinse'; did you mean 'num_machines'?"),
        ("flavour", "unknown setting 'flavour'"),
        ("envv.A", "unknown setting 'envv.A'; did you mean 'env.A'?"),
        ("num_machines", "'num_machines' is not set in the profile"),
        ("env.B", "'env.B' is not set in the profile; did you mean 'env.A'?"),
    ],
)
def test_unset_tells_an_unknown_setting_from_one_that_is_not_set(
    key: str, what: str, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "unset", key]) == 2
    assert capsys.readouterr().err.startswith(f"error: {what}\n")


def test_a_key_that_no_setting_has_can_be_removed_from_the_profile(profile: Path) -> None:
    profile.write_text(PROFILE + "colour: red\n")
    assert main(["config", "unset", "colour"]) == 0
    assert profile.read_text() == PROFILE


def test_a_project_profile_that_is_the_users_too_is_checked_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("headway.yaml").write_text("device: cpu\n")
    monkeypatch.setenv("HEADWAY_PROFILE", "headway.yaml")
    assert main(["config", "validate"]) == 0
    assert capsys.readouterr().out == "~/work/headway.yaml: ok\n"


@pytest.mark.wording
def test_a_variable_that_stands_twice_is_refused(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", "env=A=1 A=2"]) == 2
    errors = capsys.readouterr().err
    assert "env is 'A=1 A=2', in which A is set twice" in errors
    assert "fix:  keep one value of A\n" in errors


@pytest.mark.wording
def test_use_names_the_command_line_for_a_name_that_cannot_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "use", "a b"]) == 2
    assert "from: the command line" in capsys.readouterr().err


@pytest.mark.wording
def test_a_broken_profile_is_named_by_set(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write_text("device: cpu\nranks:\n")
    assert main(["config", "set", "device=mps"]) == 2
    assert "from: profile ~/.config/headway/default.yaml, line 2" in capsys.readouterr().err


@pytest.mark.wording
def test_a_value_on_the_command_line_is_not_looked_for_in_the_file(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", "machine_rank=3"]) == 2
    assert "from: machine_rank: the command line; num_machines:" in capsys.readouterr().err


def test_control_characters_of_a_profile_do_not_steer_the_terminal(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write_text('log_dir: "logs\\e[2J"\n')
    assert main(["config", "show"]) == 0
    assert main(["config", "list"]) == 0
    out = capsys.readouterr().out
    assert out.count(r"logs\x1b[2J") == 2
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("num_processes", "'num_processes' is not KEY=VALUE"),
        ("env.=1", "unknown setting 'env.'"),
        ("num_processes.x=1", "unknown setting 'num_processes.x'; did you mean 'num_processes'?"),
        ("log_dir=a\0b", "which contains a null byte"),
        ("main_address=a b", "which is neither a host name nor an IP address"),
    ],
)
def test_one_mistake_is_one_error(
    word: str, said: str, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", word]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("error: ") == 1


def test_links_that_go_round_in_circles_are_no_profile(capsys: pytest.CaptureFixture[str]) -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    assert main(["config", "set", "--profile", "loop.yaml", "device=cpu"]) == 2
    assert "Too many levels of symbolic links" in capsys.readouterr().err
    assert Path("loop.yaml").is_symlink()


@pytest.mark.wording
def test_list_marks_a_profile_whose_values_cannot_be(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write_text("device: x\n")
    assert main(["config", "list"]) == 0
    assert "invalid: device is 'x'" in capsys.readouterr().out


def test_export_asks_for_its_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "export"]) == 2
    assert "--format is required: one of torchrun, env" in capsys.readouterr().err


def test_what_the_file_had_before_is_wrong_where_it_stands(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write_text("version: 1\ndevise: cpu\nnum_processes: zero\n")
    assert main(["config", "unset", "devise"]) == 2
    err = capsys.readouterr().err
    assert "num_processes is 'zero'" in err
    assert "line 3, column 1" in err
    assert "'devise'" not in err


def test_a_key_that_is_not_set_is_no_typo_of_another(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "unset", "devices"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_an_unknown_key_is_answered_by_a_command_that_lists_them(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", "colour=1"]) == 2
    assert "`headway config set --help` lists all settings" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["config", "set", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in TABLE)


def test_set_writes_values_as_the_schema_has_them(profile: Path) -> None:
    words = ["num_processes= 3 ", "device=CPU", "mixed_precision=false", "log_dir=My Logs"]
    assert main(["config", "set", *words]) == 0
    text = profile.read_text()
    for line in ("num_processes: 3\n", "device: cpu ", "mixed_precision: no", 'dir: "My Logs"'):
        assert line.replace(": no", ': "no"') in text


def test_set_begins_a_file_that_holds_comments_alone(profile: Path) -> None:
    profile.write_text("# later\n\n# more\n")
    assert main(["config", "set", "device=cpu"]) == 0
    assert profile.read_text() == "# later\n\n# more\nversion: 1\ndevice: cpu\n"


def test_use_says_which_profile_wins_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_PROFILE", "gpu4")
    assert main(["config", "use", "default"]) == 0
    note = "headway: note: environment HEADWAY_PROFILE selects 'gpu4' here instead\n"
    assert capsys.readouterr().err == note
    assert main(["config", "show", "--profile", ""]) == 2
    assert "unset HEADWAY_PROFILE" not in capsys.readouterr().err  # it plays no part


@pytest.mark.wording
def test_fixes_can_be_typed_where_they_are_printed(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--yes", "--set", "device=cuda"]) in (2, 3)
    err = capsys.readouterr().err
    assert "fix:  set `device: cpu`" in err
    assert main(["config", "--profile", "gpu4", "show"]) == 2
    assert "fix:  `headway config show --profile gpu4`" in capsys.readouterr().err


def test_very_many_mistakes_are_not_all_printed(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write_text("".join(f"key_{number}: 1\n" for number in range(300)))
    assert main(["config", "show"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 50 * 3 + 1
    assert lines[-1] == "and 250 more errors"
