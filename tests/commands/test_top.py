"""`headway top`, of launches whose stats the test sets; no rank is started."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator

import pytest
from rich.console import Console

from headway.commands import top
from headway.errors import ConfigError
from headway.ipc.records import StepStats
from headway.launcher.diagnosis import run_socket
from headway.launcher.diagnosis.run_socket import ActiveRun, RunSocket
from headway.launcher.step_stats.run_stats import RunStats
from tests.commands.running import run
from tests.launcher.step_stats.test_run_stats import SLOW, USUAL, WAITING

OTHER = ActiveRun(4321, "other.py", 1, 0, 1, 2e9)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunStats]:
    """A launch of four ranks, and beside it a newer one with one rank; no others."""
    stats = RunStats()
    stats.begin_attempt(4)
    opened = RunSocket(ActiveRun(os.getpid(), "train.py", 4, 0, 1, 1e9))
    opened.stats = lambda: stats.to_json(lambda rank: f"line \x1b[31mof {rank}")
    own = {
        address
        for address in run_socket._list_addresses()
        if (found := run_socket._ask(address)[0]) and found.pid == os.getpid()
    }
    monkeypatch.setattr(run_socket, "_list_addresses", lambda: [*own])
    other = RunStats()
    other.begin_attempt(1)
    other.note(0, USUAL._replace(samples=0))
    answers = run_socket.request_stats
    monkeypatch.setattr(top, "request_stats", lambda: [*answers(), (OTHER, other.to_json(str))])
    yield stats
    opened.close()


def printed(*words: str) -> str:
    code, text = run("top", *words)
    assert code == 0, text
    return text


def slow_down(stats: RunStats, *records: StepStats) -> None:
    for _ in range(4):
        for rank, record in enumerate(records):
            stats.note(rank, record)


def screen(width: int, word: str | None = "mine", runs: list[top.Watched] | None = None) -> str:
    """Return the live screen of that width."""
    word = str(os.getpid()) if word == "mine" else word
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(top.screen_of(top.watched() if runs is None else runs, word, width))
    return console.export_text()


def test_all_ranks_of_all_runs_and_the_slow_one_are_one_json_object(launch: RunStats) -> None:
    slow_down(launch, WAITING, WAITING, SLOW, WAITING)
    run, other = json.loads(printed("--json"))["runs"]
    assert (run["program"], len(run["ranks"])) == ("train.py", 4)
    assert run["slowest"]["rank"] == 2
    assert run["slowest"]["cause"] == "data"
    rank = run["ranks"][2]
    assert rank["step_ms"] == pytest.approx(130)
    assert rank["data_share"] == pytest.approx(0.8 / 2.6)
    assert rank["samples_per_s"] == pytest.approx(640 / 2.6)
    assert rank["rss_bytes"] == SLOW.rss_bytes
    assert (other["pid"], other["program"], other["slowest"]) == (4321, "other.py", None)
    assert other["ranks"][0]["step"] == 100


def test_a_table_of_the_runs_and_one_of_the_ranks_are_printed(launch: RunStats) -> None:
    slow_down(launch, WAITING, WAITING, SLOW, WAITING)
    out = printed(str(os.getpid()))
    assert "train.py" in out
    assert "100/1000" in out
    assert "line \\x1b[31mof 3" in out  # a rank cannot move the cursor
    assert "rank 2 delays all ranks by 30 ms per 130 ms step: its data loader" in out


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize("words", [["4321", "--json"], ["--json", "4321"]])
def test_flags_are_taken_on_both_sides_of_the_run(words: list[str]) -> None:
    assert [run["pid"] for run in json.loads(printed(*words))["runs"]] == [4321]


def test_a_run_that_is_not_there_is_refused(launch: RunStats) -> None:
    with pytest.raises(ConfigError, match="'1' is not the process ID of one of your"):
        top.main(["1"])


@pytest.mark.usefixtures("launch")
def test_before_the_first_step_there_are_no_ranks() -> None:
    assert json.loads(printed("--json"))["runs"][0]["ranks"] == []
    assert printed(str(os.getpid())).endswith("no rank has reported an optimizer step yet\n")


@pytest.mark.usefixtures("launch")
def test_launches_that_wait_for_idle_gpus_are_listed_in_queue_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(top, "waiting_launches", lambda: ["process 41", "process 7"])
    lines = printed().splitlines()
    assert lines[:2] == [f"waiting for idle GPUs: {n}" for n in ("1. process 41", "2. process 7")]
    assert "waiting for idle GPUs: 2. process 7" in screen(150)
    assert json.loads(printed("--json"))["waiting"] == ["process 41", "process 7"]


def test_of_several_launches_it_is_said_whose_ranks_are_shown(launch: RunStats) -> None:
    slow_down(launch, WAITING, WAITING, SLOW, WAITING)
    said = "showing the ranks of 4321; `headway top PID` shows another launch"
    assert said in screen(150, None)
    assert "headway top PID" not in screen(150)
    assert said in printed()
    assert "headway top PID" not in printed("4321")


def test_the_live_screen_has_the_runs_the_ranks_and_the_sentences(launch: RunStats) -> None:
    slow_down(launch, WAITING, WAITING, SLOW, WAITING)
    text = screen(150)
    assert "other.py" in text
    assert "rank 2 delays all ranks" in text
    launch.drop_machine(0)
    text = screen(150)
    assert text.count("(machine lost)") == 4
    assert "delays all ranks" not in text
    assert "you have no running launches" in screen(150, None, [])


def test_the_live_screen_ends_with_q_and_with_the_run_that_is_named(
    launch: RunStats, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, keyboard = os.openpty()
    with open(terminal, "wb", buffering=0) as typed, open(keyboard) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        typed.write(b"q")
        top.watch(None)
        assert "has ended" not in capsys.readouterr().out
        top.watch("1")
        assert capsys.readouterr().out.endswith("1 has ended\n")


@pytest.mark.parametrize(
    ("width", "head"),
    [
        (120, "rank       step   ms a step   compute"),
        (80, "step   ms a step   data   sync   samples/s"),
    ],
)
def test_in_a_narrow_terminal_all_that_the_live_screen_has_is_whole(
    launch: RunStats, width: int, head: str
) -> None:
    slow_down(launch, WAITING, WAITING, SLOW, WAITING)
    text = screen(width)
    assert head in text
    rows = [line.split() for line in text.splitlines() if "100/1000" in line]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]  # one line each, with its rank
    assert "…" not in text.partition("last line")[0]


def test_the_machine_is_shown_where_there_are_several(launch: RunStats) -> None:
    for rank in range(4):
        launch.note(rank, USUAL, machine=rank // 2, host=f"n{rank // 2}")
    assert "machine" in screen(80)


def test_a_program_cannot_move_the_cursor_by_its_name() -> None:
    assert top.row_of(OTHER._replace(program="a\x1b[31m.py"))[1] == "a\\x1b[31m.py"
