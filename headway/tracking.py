"""Re-exports the names that scripts import from `accelerate.tracking`."""

from headway.trackers.adapters import (
    MLflowTracker as MLflowTracker,
    TensorBoardTracker as TensorBoardTracker,
    TrackioTracker as TrackioTracker,
    WandBTracker as WandBTracker,
)
from headway.trackers.choice import (
    LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS,
    LoggerType as LoggerType,
    get_available_trackers as get_available_trackers,
    register_tracker_class as register_tracker_class,
)
from headway.trackers.jsonl import JsonlTracker as JsonlTracker
from headway.trackers.tracker import (
    GeneralTracker as GeneralTracker,
    on_main_process as on_main_process,
)

__all__ = [name for name in dir() if not name.startswith("_")]
