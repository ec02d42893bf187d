"""The names that scripts import from `accelerate.tracking`; nothing is defined here."""

from __future__ import annotations

from headway.trackers.adapters import (
    CometMLTracker,
    MLflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)
from headway.trackers.choice import (
    LOGGER_TYPE_TO_CLASS,
    LoggerType,
    get_available_trackers,
    register_tracker_class,
)
from headway.trackers.jsonl import JsonlTracker
from headway.trackers.tracker import GeneralTracker, on_main_process

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "CometMLTracker",
    "GeneralTracker",
    "JsonlTracker",
    "LoggerType",
    "MLflowTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]
