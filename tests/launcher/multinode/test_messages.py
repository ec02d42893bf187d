"""A message is taken only as the other end sent it, and the run's key is never shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.commands.main import main
from headway.errors import ConfigError
from headway.ipc import typed
from headway.launcher.multinode.messages import (
    MAX_DETAILS,
    MAX_LINE,
    Done,
    Failed,
    InvalidPeer,
    MachineHeartbeat,
    Missing,
    Session,
    StartRound,
    new_greeting,
    read_greeting,
)
from headway.launcher.multinode.preflight import describe_run_key, run_key

KEY = b"0123456789abcdef"


def sessions(key: bytes = KEY, other_key: bytes = KEY) -> tuple[Session, Session]:
    """Return the two ends of a connection: machine 0's, and that of another machine."""
    hub, member = new_greeting(key), new_greeting(other_key)
    return (Session(key, hub, member, is_hub=True), Session(other_key, member, hub, is_hub=False))


def sealed(session: Session, *texts: str) -> list[bytes]:
    return [session.seal(Missing(text)).rstrip(b"\n") for text in texts]


def test_messages_arrive_as_they_were_sent_in_both_directions() -> None:
    hub, member = sessions()
    failed = Failed(1, "n2", "cause\n\u2028", "where", "lines\nof details", "fix", 9, 2, 0.5)
    start = StartRound(0, 1, 2, 1, 2, "10.0.0.1", 4711)
    for message in (failed, Done(failed), Done(), MachineHeartbeat(), start):
        assert member.open(hub.seal(message).rstrip(b"\n")) == message
        assert hub.open(member.seal(message).rstrip(b"\n")) == message


def test_the_longest_report_of_a_failure_arrives_whatever_its_characters() -> None:
    for character in ("\N{GRINNING FACE}", "\udc80", '"', "\0"):
        hub, member = sessions()
        failed = Failed(1, "n2", "", "", character * MAX_DETAILS, "", 9)
        line = member.seal(failed).rstrip(b"\n")
        assert len(line) < MAX_LINE
        assert hub.open(line) == failed


def test_a_message_made_with_another_key_is_refused() -> None:
    hub, stranger = sessions(other_key=b"another key, as long")
    with pytest.raises(InvalidPeer) as error:
        hub.open(*sealed(stranger, "hello"))
    assert error.value.reason == "key"


def test_a_message_that_is_repeated_left_out_or_reordered_is_refused() -> None:
    for *before, last in ([0, 0], [1], [0, 2], [0, 1, 0]):
        hub, member = sessions()
        lines = sealed(member, "a", "b", "c")
        for index in before:
            hub.open(lines[index])
        with pytest.raises(InvalidPeer):
            hub.open(lines[last])


def test_a_message_of_this_end_or_of_another_connection_is_refused() -> None:
    hub, _ = sessions()
    with pytest.raises(InvalidPeer):
        hub.open(*sealed(sessions()[1], "of another connection"))
    with pytest.raises(InvalidPeer):
        hub.open(*sealed(hub, "reflected"))


@given(st.binary(max_size=300), st.integers(0, 200), st.integers(0, 7))
def test_no_bytes_and_no_changed_bit_are_taken_for_a_message(
    data: bytes, place: int, bit: int
) -> None:
    hub, member = sessions()
    with pytest.raises(InvalidPeer):
        hub.open(data)
    line = bytearray(sealed(member, "x" * 200)[0])
    line[place] ^= 1 << bit
    with pytest.raises(InvalidPeer):
        hub.open(bytes(line))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
KINDS = st.sampled_from(
    ["Join", "MachineReady", "Failed", "StartRound", "MachineHeartbeat", "Restart", "exec", ""]
)


@given(st.one_of(JSON, st.builds(lambda kind, rest: [kind, *rest], KINDS, st.lists(JSON))))
def test_whatever_one_with_the_key_sends_is_a_message_of_the_declared_types_or_refused(
    content: object,
) -> None:
    hub, member = sessions()
    text = json.dumps(content)
    with patch.object(typed, "_dumps", lambda *_, **__: text):
        line = member.seal(MachineHeartbeat()).rstrip(b"\n")
    try:
        message = hub.open(line)
    except InvalidPeer:
        return
    assert json.loads(json.dumps([type(message).__name__, *message])) == json.loads(text)


@given(st.binary(max_size=100))
def test_no_bytes_are_taken_for_a_greeting(data: bytes) -> None:
    with pytest.raises(InvalidPeer):
        read_greeting(data)


def test_a_greeting_of_another_version_says_so() -> None:
    line = new_greeting(KEY).line().rstrip(b"\n")
    assert read_greeting(line).has_key
    with pytest.raises(InvalidPeer) as error:
        read_greeting(line.replace(b"channel/2", b"channel/3"))
    assert error.value.reason == "version"


def test_without_a_key_there_is_none_and_the_way_to_one_is_printed() -> None:
    assert run_key({}) == b""
    assert "openssl rand" in describe_run_key({})


def test_the_environment_has_the_key_and_a_short_one_is_refused() -> None:
    assert run_key({"HEADWAY_RUN_KEY": "0123456789abcdef"}) == b"0123456789abcdef"
    for short in ("", "secret"):
        with pytest.raises(ConfigError) as error:
            run_key({"HEADWAY_RUN_KEY": short})
        assert not short or short not in str(error.value)


def test_a_plan_hides_the_key_from_the_script_and_from_the_reader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").touch()
    monkeypatch.setenv("HEADWAY_RUN_KEY", "not to be shown to anybody")
    place = ["--num-machines", "2", "--machine-rank", "1", "--main-address", "n1"]
    assert main(["launch", "--dry-run", "--cpu", *place, "train.py"]) == 0
    out = capsys.readouterr().out
    assert "- HEADWAY_RUN_KEY" in out
    assert "not to be shown" not in out
    assert "machines authenticate each other with HEADWAY_RUN_KEY" in out
    assert os.environ["HEADWAY_RUN_KEY"]
