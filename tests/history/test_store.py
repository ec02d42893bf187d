"""Records on disk: private, bounded, of one format."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.history import store
from headway.history.record import StatsSeries, find, read_all
from headway.history.store import new_path, runs_folder
from tests.history.runs import record_file, stats, write_run


def test_nobody_else_may_read_a_record() -> None:
    record = write_run()
    assert stat.S_IMODE(os.stat(record.path).st_mode) == 0o700


def test_a_record_is_read_as_it_was_written() -> None:
    rows = [(rank, stats(step)) for rank in (0, 1) for step in (10, 20)]
    record = write_run(rows=rows, tails={1: ["\udcff"]}, arguments=("\udcf0", "a\nb"))
    assert find(None) == record
    assert (record.num_steps, record.samples_per_s) == (20, 640.0)


def test_a_record_that_cannot_be_written_leaves_no_part_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / store.FILE).mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        store.write(str(folder), {})
    assert os.listdir(folder) == [store.FILE]


def test_launches_of_one_second_have_folders_of_their_own() -> None:
    assert len({new_path() for _ in range(50)}) == 50


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"format":5', '"format":2', "has format 2, but this version of Headway reads 5"),
        ('"is_rank":false', '"is_rank":0', "is damaged: start.is_rank is 0, not of type bool"),
        ('"job":"",', "", "is damaged: start has missing fields: job"),
        ("}", "", "is damaged: it is not JSON"),
        pytest.param("", "[" * 10**5, "is damaged: it is not JSON", id="nested"),
        ("", "null", "is damaged: it has no format number"),
        ("", "[]", "is damaged: it has no format number"),
        ("", "{}", "is damaged: it has no format number"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused_by_its_name(old: str, new: str, said: str) -> None:
    record = write_run()
    file = record_file(record)
    text = file.read_text()
    file.write_text(text.replace(old or text, new))
    with pytest.raises(ConfigError, match=f"the record of run {record.name} {said}"):
        find(record.name)
    found, refused = read_all()
    assert not found
    assert record.name in refused[0]


def test_a_run_that_has_just_begun_is_in_no_list() -> None:
    record = write_run()
    whole = record_file(record).rename(record_file(record).with_name("whole"))
    assert read_all() == ([], [])
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        find(record.name)
    os.mkfifo(record_file(record))  # nothing waits for who might write
    assert "it is not a file" in read_all()[1][0]
    record_file(record).unlink()
    record_file(record).symlink_to(whole)
    assert "it is a link" in read_all()[1][0]
    record_file(record).unlink()
    os.truncate(whole.rename(record_file(record)), 2**26 + 1)
    assert "it has more than 67108864 bytes" in read_all()[1][0]


def test_the_oldest_of_too_many_runs_go() -> None:
    for _ in range(205):
        write_run()
    before = store.names_in(runs_folder())
    store.prune(runs_folder())
    assert store.names_in(runs_folder()) == before[5:]


def test_a_run_is_found_by_the_beginning_or_the_end_of_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, damaged = write_run(), write_run(), write_run()
    record_file(damaged).write_text("[]")
    assert find(None).name == second.name
    assert f"note: the record of run {damaged.name} is damaged" in capsys.readouterr().err
    shutil.rmtree(damaged.path)
    assert find(first.name[-6:]).name == first.name
    with pytest.raises(ConfigError, match="matches 2 runs; the newest are"):
        find("2024")
    with pytest.raises(ConfigError, match=r"unknown run .* did you mean"):
        find(first.name[:-1] + "x")


def test_stats_of_any_length_keep_their_sums_in_few_rows() -> None:
    series = StatsSeries()
    for step in range(10, 50_010, 10):
        loss = float("nan") if step == 50_000 else 2.0
        for rank in (0, 1):
            series.note(rank, stats(step, loss=loss, stolen_s=0.5))
    series.note(0, stats(50_000).empty_at(50_003, 1.0))
    series.note(2, stats(50_000).empty_at(50_003, 1.0))  # nothing else is known of it
    first, second, _ = (rank.stats for rank in series.ranks({}))
    assert len(first) + len(second) <= 1200
    assert first[-1].step == 50_003
    assert sum(row.num_steps for row in second) == 50_000
    assert sum(row.seconds for row in second) == pytest.approx(5000)
    assert sum(row.stolen_s for row in second) == pytest.approx(2500)
    assert (second[-1].step, second[-1].loss) in ((50_000, None), (50_000, 2.0))


def test_a_loss_that_diverges_is_on_record_as_far_as_it_can_be_drawn() -> None:
    losses = [1e25, -3e99, 1e101, float("inf"), float("nan")]
    write_run(rows=[(0, stats(step, loss=loss)) for step, loss in enumerate(losses, 1)])
    kept = [row.loss for row in find(None).stats[0]]
    assert kept == [1e25, -3e99, None, None, None]
