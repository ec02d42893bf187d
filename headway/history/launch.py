"""What is known of a run at its start. Imported on the path of a launch of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

FORMAT = 1
"""Of records: raised with every change of their classes, as no other format is read."""


class Launch(NamedTuple):
    """What was launched; secrets are masked."""

    began_at: float
    pid: int
    host: str
    folder: str
    kind: str  # as of a plan's program
    program: str
    script: str  # the path of its file; empty where that is not known
    arguments: tuple[str, ...]
    command: tuple[str, ...]  # the words after `headway launch`; empty if they were too long
    python: tuple[str, ...]
    settings: Mapping[str, str]  # their values as text
    origins: Mapping[str, str]  # where each setting that is no default came from
    environment: Mapping[str, str]  # the variables that the setting `env` gives
    machine: Mapping[str, str]
    variables: Mapping[str, str]  # of the environment, those that affect training
    num_processes: int
    num_machines: int
    supervised: str | None  # why a launcher stayed; None: the script replaced it
    job: str  # of a scheduler; empty for none
    snapshot: str  # the folder of the copy of the code that was run; empty for none
    is_rank: bool  # the script found RANK, WORLD_SIZE, ...


class Commit(NamedTuple):
    """The state of the script's git repository."""

    root: str
    commit: str
    diff: str | None  # of the files against the commit; None: git took too long
