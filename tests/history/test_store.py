"""Records on disk: private, bounded, and read as far as they go."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from headway.contract.records import Kept
from headway.errors import ConfigError
from headway.history import store
from headway.history.place import STAMP, new_path, runs_folder
from headway.history.record import MAX_BYTES, End, Record, Row, Series, Start, Unreadable
from tests.history.runs import HERE, START, figures, record_file, write_run


def test_nobody_else_may_enter_the_folder_of_a_run() -> None:
    folder = Path(runs_folder())
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    record = write_run()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(os.stat(record.path).st_mode) == 0o700
    assert stat.S_IMODE(record_file(record).stat().st_mode) == 0o600


def test_launches_of_one_second_have_folders_of_their_own() -> None:
    assert len({new_path() for _ in range(50)}) == 50


def test_a_record_that_was_cut_off_is_read_as_far_as_it_goes() -> None:
    record = write_run(code=1)
    data = record_file(record).read_bytes()
    for size in range(len(data.split(b"\n")[0]) + 1, len(data), 97):
        record_file(record).write_bytes(data[:size])
        assert store.read_record(record.path).start == record.start
    record_file(record).write_bytes(data[:100])
    with pytest.raises(Unreadable, match="does not say what was launched"):
        store.read_record(record.path)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"record":"End","version":1,"time":1e400,"exit_code":0}',
        b'{"record":"End","version":1,"time":1.0,"exit_code":1' + b"0" * 400 + b"}",
        b'{"record":"Kept","version":1,"what":7,"path":"/"}',
        b'{"record":"__class__","version":1}',
        b'{"record":["End"],"version":1}',
        b'"End"',
        b"\xff\xfe\x00",
    ],
)
def test_a_hostile_line_is_left_out_and_counted(line: bytes) -> None:
    record = write_run()
    with record_file(record).open("ab") as file:
        file.write(line + b"\n")
    again = store.read_record(record.path)
    assert (again.start, again.end, again.damaged) == (record.start, record.end, 1)


def test_a_record_of_another_version_is_refused_by_its_name() -> None:
    record = write_run()
    text = record_file(record).read_text().replace('"version":1', '"version":2')
    record_file(record).write_text(text)
    with pytest.raises(ConfigError, match=f"run {record.name} has version 2"):
        store.find(record.name)
    found, refused = store.read_all()
    assert not found
    assert record.name in refused[0]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_record_that_is_no_file_is_not_followed(kind: str, tmp_path: Path) -> None:
    record = write_run()
    file = record_file(record)
    data = file.read_bytes()
    file.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.raises(ConfigError, match=record.name):
        store.find(record.name)


def test_the_folder_of_all_runs_may_be_a_link_of_its_owner(tmp_path: Path) -> None:
    runs = Path(runs_folder())
    runs.parent.mkdir(parents=True)
    (tmp_path / "large disk").mkdir()
    runs.symlink_to(tmp_path / "large disk")
    record = write_run()
    assert store.names_in(str(runs)) == [record.name]
    if os.geteuid() == 0:
        os.chown(runs, 65534, 65534, follow_symlinks=False)
        with pytest.raises(PermissionError):
            store.create(str(runs / record.name))


def test_a_run_that_is_a_link_is_no_run(tmp_path: Path) -> None:
    record = write_run()
    Path(record.path).rename(tmp_path / "elsewhere")
    Path(record.path).symlink_to(tmp_path / "elsewhere")
    assert store.names_in(runs_folder()) == []


def test_a_record_for_which_the_disk_had_no_room_is_none() -> None:
    record = write_run()
    record_file(record).write_bytes(b"")
    assert store.read_all() == ([], [])
    with pytest.raises(ConfigError):
        store.find(record.name)


def test_a_huge_record_is_not_read_whole() -> None:
    record = write_run()
    with record_file(record).open("r+b") as file:
        file.truncate(2**40)  # sparse
    assert store.read_record(record.path).start == record.start


def test_a_record_stays_below_a_mebibyte_and_keeps_its_end() -> None:
    path = new_path()
    store.create(path)
    store.append(path, START)
    for _ in range(40):
        store.append(path, Kept("logs", "x" * 50_000))
    store.replace_figures(path, [Row(rank, figures(1)) for rank in range(20_000)])
    store.append(path, End(2.0, 1, "r" * 30_000))
    assert sum(one.stat().st_size for one in Path(path).iterdir()) < MAX_BYTES
    assert store.read_record(path).end == End(2.0, 1, "r" * 30_000)


def named(seconds: float, count: int = 0) -> str:
    return f"{time.strftime(STAMP, time.gmtime(seconds))}-{count:06x}"


def put(name: str, start: Start = START) -> None:
    path = os.path.join(runs_folder(), name)
    store.create(path)
    store.append(path, start)


def test_the_oldest_of_more_than_200_runs_go() -> None:
    now = 1_700_000_000
    for count in range(205):
        put(named(now - 205 + count, count))
    before = store.names_in(runs_folder())
    store.prune(runs_folder(), now)
    assert store.names_in(runs_folder()) == before[5:]


def test_runs_of_more_than_30_days_go_but_not_the_last_ones_when_the_clock_jumps() -> None:
    now = 1_700_000_000
    for count in range(30):
        put(named(now - 40 * 86400 + count, count))
    put(named(now))
    store.prune(runs_folder(), now)
    assert len(store.names_in(runs_folder())) == 20
    store.prune(runs_folder(), now + 10 * 365 * 86400)
    assert len(store.names_in(runs_folder())) == 20


def test_a_run_that_goes_on_is_not_removed() -> None:
    now = time.time()
    old = named(now - 40 * 86400)
    put(old, START._replace(began_at=now, **HERE))
    for count in range(25):
        put(named(now - 5 + count % 5, count + 1))
    store.prune(runs_folder(), now)
    assert old in store.names_in(runs_folder())


def test_a_run_is_found_by_the_beginning_or_the_end_of_its_name() -> None:
    first, second = write_run(), write_run()
    assert store.find(None).name == second.name
    assert store.find(first.name[-6:]).name == first.name
    with pytest.raises(ConfigError, match="may mean 2 runs"):
        store.find("2024")
    with pytest.raises(ConfigError, match="the name of no run; did you mean"):
        store.find(first.name[:-1] + "x")


def test_figures_of_any_length_keep_their_sums_in_few_rows() -> None:
    series = Series()
    for step in range(10, 50_010, 10):
        loss = float("nan") if step == 50_000 else 2.0
        for rank in (0, 1):
            series.note(rank, figures(step, loss=loss, stolen_s=0.5))
        if step == 50_000:
            series.note(0, figures(step).moved_to(50_003, 1.0))
            series.note(2, figures(step).moved_to(50_003, 1.0))  # nothing else is known of it
    rows = series.rows()
    assert len(rows) <= 1200
    assert [row.step for rank, row in rows if rank != 1][-1] == 50_003
    assert all(row.num_steps for _, row in rows)
    of_one = [row for rank, row in rows if rank == 1]
    assert sum(row.num_steps for row in of_one) == 50_000
    assert sum(row.seconds for row in of_one) == pytest.approx(5000)
    assert sum(row.stolen_s for row in of_one) == pytest.approx(2500)
    assert (of_one[-1].step, of_one[-1].loss) in ((50_000, None), (50_000, 2.0))


def test_a_loss_that_diverges_is_on_record_as_far_as_it_can_be_drawn() -> None:
    series = Series()
    losses = [1e25, -3e99, 1e101, float("inf"), float("nan")]
    for step, loss in enumerate(losses, 1):
        series.note(0, figures(step, loss=loss))
    record = write_run(rows=[Row(rank, row) for rank, row in series.rows()])
    assert record.damaged == 0
    assert [row.loss for row in record.figures[0]] == [1e25, -3e99, None, None, None]


def test_speed_and_steps_are_those_of_all_ranks() -> None:
    rows = [Row(rank, figures(step)) for rank in (0, 1) for step in (10, 20)]
    record: Record = write_run(rows=rows)
    assert (record.num_steps, record.samples_per_s) == (20, 640.0)


@pytest.mark.processes
def test_a_run_that_was_killed_and_whose_parent_does_not_ask_for_it_has_ended() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    started = START._replace(**{**HERE, "pid": child, "began_at": time.time()})
    record = Record("a", "/a", started)
    assert not store.is_running(record)
    os.waitpid(child, 0)
