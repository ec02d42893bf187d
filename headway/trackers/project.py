"""`ProjectConfiguration`, which sets the folders of checkpoints and trackers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from headway.distributed.handler import check_call, check_range
from headway.errors import Code, UsageError

Folder = str | os.PathLike[str] | None


@dataclass
class ProjectConfiguration:
    """Sets the folders of trackers and checkpoints; see `Accelerator(project_config=...)`.

    Args:
        project_dir: the project folder; checkpoints with generated names are in its subfolder
            `checkpoints`.
        logging_dir: the folder for the trackers' files; None uses `project_dir`.
        automatic_checkpoint_naming: if True, `save_state()` writes `checkpoints/checkpoint_0`,
            `checkpoint_1`, ..., and `load_state()` without a path loads the newest checkpoint.
        total_limit: number of checkpoints to keep; a complete new checkpoint replaces the oldest.
        iteration: the number of the next checkpoint.
        save_on_each_node: unsupported, because all machines share one folder per checkpoint.

    Raises:
        UsageError: `save_on_each_node` is True, `total_limit` is not an integer of at least 1, or a
            value has the wrong type.

    Examples:
        >>> from headway.utils import ProjectConfiguration
        >>> configuration = ProjectConfiguration(total_limit=3)
        >>> configuration.set_directories("runs")
        >>> configuration.logging_dir
        'runs'
    """

    project_dir: Folder = None
    logging_dir: Folder = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        check_call(type(self).__init__, (), vars(self))
        where = "the script's ProjectConfiguration(...)"
        self.set_directories(self.project_dir)
        if self.save_on_each_node:
            raise UsageError(
                "save_on_each_node=True is not supported",
                where=where,
                fix="remove it, and save to a folder shared by all machines",
                code=Code.UNSUPPORTED,
            )
        check_range("ProjectConfiguration", 1, total_limit=self.total_limit)

    def set_directories(self, project_dir: Folder = None) -> None:
        """Set `project_dir`, and also `logging_dir` if it is unset."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


def merged_project(
    config: ProjectConfiguration | None, project_dir: Folder
) -> ProjectConfiguration:
    if config is None:
        return ProjectConfiguration(project_dir=project_dir)
    if config.project_dir is None and project_dir is not None:
        config.set_directories(project_dir)
    return config
