"""`headway checkpoint`: lists, verifies and removes checkpoints."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.errors import CheckpointError, ConfigError, MachineError
from tests.checkpoint.saved import rewrite, save
from tests.commands.running import run

FOLDER = Path("runs/checkpoints")


@pytest.fixture(autouse=True)
def saved(own_surroundings: None) -> None:
    for step in (9, 10, 11):
        save(FOLDER / f"checkpoint_{step}", step=step)


def listed(folder: Path = FOLDER) -> list[str]:
    """Return the lines of a list, below its head."""
    code, text = run("checkpoint", "ls", str(folder))
    assert code == 0, text
    return text.splitlines()[1:]


def test_a_list_has_the_oldest_first_with_their_steps_ranks_and_sizes() -> None:
    rewrite(FOLDER / "checkpoint_10", lambda fields: fields.update(world_size=8))
    rows = [re.split("  +", line) for line in listed()]
    assert [row[:3] for row in rows] == [
        [f"checkpoint_{step}", "complete", str(step)] for step in (9, 10, 11)
    ]
    assert [row[4] for row in rows] == ["1", "8", "1"]
    assert " B " in listed()[0]  # not 0.0 MiB


def test_a_list_says_which_checkpoints_lack_something() -> None:
    (FOLDER / "checkpoint_9" / "values.json").unlink()
    (FOLDER / "checkpoint_10" / "values.json").write_text("longer than it was")
    save(FOLDER / "checkpoint_12")
    (FOLDER / "checkpoint_12" / "manifest.json").write_text("{}")
    save(FOLDER / "checkpoint_13")
    (FOLDER / "checkpoint_13" / "values.json").unlink()
    (FOLDER / "checkpoint_13" / "values.json").symlink_to("/dev/zero")
    for kind in ("tmp", "old", "trash"):
        (FOLDER / f".{kind}-checkpoint_14-00000000").mkdir()
    rows = [line.split() for line in listed(FOLDER.parent)]
    assert {name: (state, step) for name, state, step, *_ in rows} == {
        "checkpoint_9": ("incomplete", "9"),
        "checkpoint_10": ("incomplete", "10"),
        "checkpoint_11": ("complete", "11"),
        "checkpoint_12": ("unreadable", "-"),
        "checkpoint_13": ("incomplete", "1"),
        ".tmp-checkpoint_14-00000000": ("incomplete", "-"),
        ".old-checkpoint_14-00000000": ("incomplete", "-"),
    }


def test_the_folder_of_a_project_stands_for_the_checkpoints_in_it() -> None:
    code, text = run("checkpoint", "ls")
    assert (code, "no checkpoints in" in text) == (0, True)
    (FOLDER.parent / "latest").symlink_to("checkpoints/checkpoint_11")
    assert "checkpoint_11" in "".join(listed(FOLDER.parent))
    assert run("checkpoint", "prune", str(FOLDER.parent), "--keep", "1")[0] == 0
    assert [path.name for path in FOLDER.iterdir()] == ["checkpoint_11"]
    FOLDER.parent.rename("-mine")
    code, text = run("checkpoint", "verify", "--", "-mine")
    assert (code, "-mine/checkpoints/checkpoint_11: ok" in text) == (0, True)


def test_a_damaged_checkpoint_is_named_and_the_others_are_verified(
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = FOLDER / "checkpoint_10" / "values.json"
    damaged.write_text("[]!")
    (FOLDER / "checkpoint_11" / "notes.txt").write_text("mine")
    folders = [str(FOLDER / f"checkpoint_{step}") for step in (10, 11)]
    assert main(["checkpoint", "verify", *folders]) == CheckpointError.exit_code
    streams = capsys.readouterr()
    assert str(damaged) in streams.err
    assert f"{folders[1]}: ok" in streams.out
    assert "notes.txt" in streams.out
    assert main(["checkpoint", "verify", folders[1]]) == 0


def test_what_could_not_be_removed_is_not_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prune = ["checkpoint", "prune", str(FOLDER), "--keep", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(PermissionError()))
        assert main(prune) == CheckpointError.exit_code
    streams = capsys.readouterr()
    assert (streams.out, "checkpoint_9" in streams.err) == ("", True)
    assert main(prune) == 0
    assert [path.name for path in FOLDER.iterdir()] == ["checkpoint_11"]


def test_no_name_reaches_the_terminal_with_its_control_characters() -> None:
    odd = FOLDER / "a\x1b[2J\nb"
    (FOLDER / "checkpoint_9").rename(odd)
    (odd / "\x1b]0;c\x07").write_text("")
    shown = [run("checkpoint", "ls", str(FOLDER)), run("checkpoint", "verify", str(odd))]
    shown += [run("checkpoint", "ls", f"{odd}-")]  # which is absent
    rewrite(odd, lambda fields: fields["files"][0].update(path="\x1b[2J"))
    shown += [run("checkpoint", "verify", str(odd))]
    shown += [run("checkpoint", "prune", str(FOLDER), "--keep", "1")]
    assert [code for code, _ in shown] == [0, 0, *[CheckpointError.exit_code] * 2, 0]
    text = "".join(text for _, text in shown)
    for chars in ("\x1b", "\x07", "\nb"):
        assert chars not in text
    assert r"a\x1b[2J\nb" in shown[0][1]


def test_prune_keeps_the_newest_and_what_is_being_saved() -> None:
    left = FOLDER / ".tmp-checkpoint_12-00000000"
    left.mkdir()
    assert main(["checkpoint", "prune", str(FOLDER), "--keep", "1"]) == 0
    assert sorted(path.name for path in FOLDER.iterdir()) == [left.name, "checkpoint_11"]


# ---------------------------------------------------------------------- export


def test_a_package_that_a_command_needs_and_does_not_find_is_named_with_what_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.delitem(sys.modules, "headway.checkpoint.loading", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["checkpoint", "export", "there", "out.safetensors"]) == MachineError.exit_code
    assert "-m pip install torch" in capsys.readouterr().err


def test_weights_are_exported_as_other_programs_read_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch = pytest.importorskip("torch")
    from headway import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)))
    accelerator.save_state("one")
    assert main(["checkpoint", "export", "one", "out.safetensors"]) == 0
    safetensors = pytest.importorskip("safetensors.torch")
    loaded = safetensors.load_file("out.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], t) for name, t in model.state_dict().items())
    other = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state("two")
    assert main(["checkpoint", "export", "two", "out.safetensors"]) == CheckpointError.exit_code
    assert "--model" in capsys.readouterr().err
    assert main(["checkpoint", "export", "two", "out.safetensors", "--model", "1"]) == 0
    assert safetensors.load_file("out.safetensors").keys() == other.state_dict().keys()
    capsys.readouterr()
    assert main(["checkpoint", "export", ".", "out.safetensors", "--model", "1"]) == 0
    assert capsys.readouterr().out.strip().endswith("two"), "the newest of the folder"
    for words in (["two", "out.safetensors", "--model", "2"], ["two", "none/out.safetensors"]):
        assert main(["checkpoint", "export", *words]) == CheckpointError.exit_code
    for words in (["two"], ["two", "out.bin"], ["two", "out.safetensors", "--model", "x"]):
        assert main(["checkpoint", "export", *words]) == ConfigError.exit_code
