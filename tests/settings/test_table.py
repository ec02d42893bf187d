"""Each setting reads what users write, from any source, and says why it does not."""

from __future__ import annotations

from itertools import chain

import pytest

from headway.machine.devices import ALL, DeviceSpec
from headway.settings.setting import AUTO, Host, Raw
from headway.settings.table import TABLE, TOPICS


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("device", "CPU", "cpu"),
        ("device", "auto", AUTO),
        ("num_processes", " 4 ", 4),
        ("num_processes", "Auto", AUTO),
        ("mixed_precision", "no", "no"),
        ("mixed_precision", "No", "no"),
        ("mixed_precision", "false", "no"),
        ("main_address", "10", "10"),
        ("main_port", "65535", 65535),
        ("hang_timeout", "600", 600),
        ("hang_timeout", "10m", 600),
        ("grace_period_s", "90s", 90),
        ("time_limit", "3h55m", 14100),
        ("time_limit", "1h0m5s", 3605),
        ("grace_period_s", "2h", 7200),
        ("env", "A=1 B='two words' C=x=y", {"A": "1", "B": "two words", "C": "x=y"}),
        ("env", ["A=$HOME", "B="], {"A": "$HOME", "B": ""}),
        ("env", {"A": "1"}, {"A": "1"}),
        # the others are in tests/machine/test_devices.py
        ("devices", "all", DeviceSpec()),
        ("devices", "auto", DeviceSpec()),
        ("devices", "MIG-a1b2,", DeviceSpec(named=("MIG-a1b2",))),
        ("devices", "MIG-GPU-8f6e/1/0", DeviceSpec(named=("MIG-GPU-8f6e/1/0",))),
        ("ranks", "3", (3,)),
        ("ranks", "0, 3", (0, 3)),
        ("ranks", "4,0-2", (0, 1, 2, 4)),
        ("ranks", ["0", "2-3"], (0, 2, 3)),
        ("ranks", "all", None),
        ("debug_rank", "0", 0),
        ("sbatch", "time=2h exclusive", {"time": "0-02:00:00", "exclusive": ""}),
        ("sbatch", ["--time=1d12h", "qos=a=b"], {"time": "1-12:00:00", "qos": "a=b"}),
        ("sbatch", {"time": "90m"}, {"time": "0-01:30:00"}),
        ("sbatch", "time=1-12:00:00", {"time": "1-12:00:00"}),
        ("sbatch", "time=unlimited", {"time": "unlimited"}),
        ("hosts", "a, me@b:2", (Host("a"), Host("me@b", 2))),
        ("hosts", ["a", "[::1]:2", "[::2]"], (Host("a"), Host("::1", 2), Host("::2"))),
        ("hosts", "None", ()),
        ("main_address", "[fd00::1]", "fd00::1"),
        ("main_address", "fe80::1%eth0", "fe80::1%eth0"),
        ("main_address", " job-master-0.ns.svc. ", "job-master-0.ns.svc."),
    ],
)
def test_a_setting_reads_what_users_write(name: str, raw: Raw, value: object) -> None:
    assert TABLE[name].parse(raw) == value


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("device", "tpu", "one of auto, cpu, cuda, gpu, mps"),
        ("device", "", "empty"),
        ("device", ["cpu"], "list"),
        ("num_processes", "four", "whole number"),
        ("num_processes", "0", "1 or more"),
        ("num_processes", "-3", "1 or more"),
        ("num_processes", "2.0", "whole number"),
        ("num_processes", "²", "whole number"),
        ("num_processes", "9" * 5000, "too large"),
        ("num_processes", {"a": "b"}, "map"),
        ("sbatch", "'time=2h junk'", "duration"),
        ("sbatch", "time=0m", "1 or more"),
        ("sbatch", "p=gpu", "not a long option of sbatch"),
        ("sbatch", {"qos": "a\nb"}, "unprintable"),
        ("sbatch", "qos=a qos=b", "twice"),
        ("hosts", "a,,b", "''"),
        ("hosts", "a:x", "whole number"),
        ("hosts", "a:0", "1 or more"),
        ("hosts", "-oProxyCommand=x", "is not HOST"),
        ("hosts", "a b", "is not HOST"),
        ("hosts", "a,b,a:2", "twice"),
        ("hosts", [], "no host"),
        ("main_address", "a b", "not a host name or IP address"),
        ("main_address", "n1:http", "not a host name or IP address"),
        ("main_address", "10.0.0.1:29500", "set its port with main_port"),
        ("main_address", "tcp://10.0.0.1", "not a host name or IP address"),
        ("main_address", "node[01-2]", "not a host name or IP address"),
        ("main_address", "0.0.0.0", "wildcard address"),
        ("main_address", "::", "wildcard address"),
        ("main_address", "255.255.255.255", "wildcard address"),
        ("main_address", "a..b", "not a host name"),
        ("main_address", "a" * 64, "not a host name"),
        ("main_address", "a." * 150, "not a host name"),
        ("main_address", "fe80::1", "%eth0"),
        ("log_dir", "$HOME/logs", "only '~'"),
        ("main_port", "65536", "from 1 to 65535"),
        ("max_restarts", "auto", "whole number"),
        ("hang_timeout", "1.5m", r"a whole number of seconds \(600\) or a duration \(10m\)"),
        ("hang_timeout", "m", "a duration"),
        ("time_limit", "5m1h", "a duration"),
        ("hang_timeout", "300000h", "too large"),
        ("restart_delay", "2m", "from 0 to 60"),
        ("env", "A", "NAME=VALUE"),
        ("env", "=1", "not a valid variable name"),
        ("env", {"A": "x\0y"}, "or contains a null byte"),
        ("env", "A='", "unclosed quote"),
        ("devices", "1,1", "twice"),
        ("devices", "1,x", "'x'"),
        ("devices", "9" * 40, "not a count"),
        ("devices", "٣", "not a count"),
        ("devices", "0", "selects no GPU: write `0,` for GPU 0"),
        ("devices", "3-1", "is descending"),
        ("devices", "0-3,2", "twice"),
        ("devices", "idle", "idle:2"),
        ("devices", "idle:0", "idle:2"),
        ("devices", "[]", "''"),
        ("devices", [], "lists no GPU"),
        ("devices", "^2", "not a count"),
        ("devices", "1.0", "not a count"),
        ("devices", {"a": "b"}, "map"),
        ("ranks", "0,", "not a rank"),
        ("ranks", "-1", "not a rank"),
        ("ranks", "3-1", "is descending"),
        ("ranks", {"a": "b"}, "map"),
    ],
)
def test_a_setting_refuses_the_rest_with_the_reason(name: str, raw: Raw, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TABLE[name].parse(raw)


def test_flags_and_variables_are_derived_from_the_names() -> None:
    row = TABLE["threads_per_process"]
    assert (row.flag, row.variable) == ("--threads-per-process", "HEADWAY_THREADS_PER_PROCESS")


def test_every_setting_has_a_help_and_an_example_that_it_reads_itself() -> None:
    for name, row in TABLE.items():
        assert row.help, name
        value = row.parse(row.example)
        assert value == row.default or row.default in (None, {}, AUTO, ALL) or value == 3


def test_every_setting_stands_below_one_heading_of_the_help() -> None:
    assert sorted(chain.from_iterable(TOPICS.values())) == sorted(TABLE)
