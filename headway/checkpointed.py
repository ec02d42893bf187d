"""The Accelerator's methods for checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.arguments import EffectiveSettings
from headway.checkpoint_hooks import CheckpointHooks
from headway.contract.records import in_phase
from headway.data.loader import PreparedDataLoader
from headway.errors import CheckpointError, UsageError
from headway.meeting import by_all_or_rank_0, meet, place_in_script
from headway.optimizer import PreparedOptimizer, PreparedScheduler
from headway.plugins.project import Folder, ProjectConfiguration
from headway.stopping import say
from headway.world import is_alone

if TYPE_CHECKING:
    from headway.checkpoint.background import Background
    from headway.checkpoint.saving import Prepared

# torch.distributed.checkpoint, below `headway.checkpoint`, is imported when it is used: it is slow


class Checkpointed(CheckpointHooks):
    """A rank whose training can be saved and go on; all ranks call these methods together.

    Attributes:
        project_configuration: how checkpoints are named, and how many stay.
    """

    project_configuration: ProjectConfiguration
    _agreed_settings: EffectiveSettings
    _skips_itself = False
    _equal_at: int | None = None  # optimizer steps, while ranks train on their own

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_state = False  # saved or loaded by this run
        # in the manifests of what rank 0 has saved, and of what was there before
        self._known_saves: set[float] = set()
        self._has_told_of_saving_alone = False
        self._background: Background | None = None  # once a checkpoint was saved without a wait

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint, with automatic naming."""
        return self.project_configuration.iteration

    def save_state(
        self,
        output_dir: Folder = None,
        safe_serialization: bool = True,
        *,
        allow_pickle: bool = False,
        wait: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save the whole training as a checkpoint, which is there once it is complete.

        It holds models, optimizers, schedulers, the loss scale, registered objects, the positions
        of prepared loaders, and each rank's random number generators; inside of gradient
        accumulation also each rank's gradients. An older checkpoint at the same place is replaced
        in one step; other files in its folder stay.

        Where rank 0 calls it alone, it saves what all ranks share, and of the rest what is rank
        0's. Sharded models need all ranks.

        Args:
            output_dir: the folder that it becomes, on a disk that all machines share. With
                `automatic_checkpoint_naming` the name is not the script's to choose, and this is
                not looked at, as in Accelerate.
            safe_serialization: without effect; there is one format, and nothing in it is pickled.
            allow_pickle: pickle the states of registered objects that hold anything else than
                values and tensors. `load_state` then needs it, too.
            wait: False: return once the state is copied to the memory of the CPU, which is kept for
                the next one; a thread writes the checkpoint, which is there when
                `wait_for_checkpoint` returns, and none of it before. The next `save_state` or
                `load_state`, `end_training` and the end of the script wait, too.

        Returns:
            The folder.

        Raises:
            UsageError: there is no folder to save to, `LocalSGD` has not averaged the weights, or a
                rank that is needed does not call it.
            CheckpointError: a rank could not save; raised on all, and older checkpoints stand. Or
                the one before, which was not waited for, could not be saved; then this one is not.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> folder = accelerator.save_state("runs/last")
            >>> accelerator.load_state(folder)
        """
        _refuse_others(save_model_func_kwargs, "save_state")
        from headway.checkpoint.folders import prune

        target = self._next_folder(output_dir)
        project = self.project_configuration
        keep = project.total_limit if project.automatic_checkpoint_naming else None
        folder = target.parent.absolute()  # `then` may be called in another working directory
        if self._background is not None:
            self._background.wait_if_alone()
        with in_phase("save_state"), self._by_all_or_rank_0() as takes_part:
            if takes_part:
                self.wait_for_checkpoint()
                self._save_to(
                    target,
                    allow_pickle,
                    wait=wait,
                    then=lambda: None if keep is None else prune(folder, keep),
                )
        project.iteration += 1
        return str(target)

    @contextmanager
    def _by_all_or_rank_0(self) -> Iterator[bool]:
        """Wait for all ranks, or let rank 0 save alone what it can; see `by_all_or_rank_0`."""
        from torch.distributed.tensor import DTensor

        weights = chain.from_iterable(one.parameters() for one in self._all(torch.nn.Module))
        if self._strategy.shards or any(isinstance(one, DTensor) for one in weights):
            meet("save_state(...)")
            yield True
            return
        with by_all_or_rank_0("save_state(...)") as takes_part:
            if is_alone() and takes_part and not self._has_told_of_saving_alone:
                self._has_told_of_saving_alone = True
                say(
                    f"note: rank 0 calls save_state(...) alone, at {place_in_script()}: its"
                    " checkpoints have what all ranks share, and rank 0's random number generators"
                    " only; let all ranks call it for checkpoints that go on exactly"
                )
            yield takes_part

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that `save_state(wait=False)` began is there.

        Raises:
            CheckpointError: a rank could not save it; raised on all, and older checkpoints stand.

        Examples:
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> folder = accelerator.save_state("runs/last", wait=False)
            >>> accelerator.wait_for_checkpoint()
        """
        if self._background is not None:
            self._background.wait()

    def end_training(self) -> None:
        """Wait for a checkpoint, finish the trackers and end the process group.

        Call it last, on every rank.

        Raises:
            CheckpointError: the checkpoint could not be saved; all else is ended.

        Examples:
            >>> accelerator.end_training()
        """
        try:
            if self._background is not None:
                self._background.close()
        finally:
            super().end_training()

    def _begin_writing(self, prepared: Prepared) -> None:
        from headway.checkpoint.background import Background

        if self._background is None:
            self._background = Background()
        self._background.start(prepared)

    def load_state(
        self,
        input_dir: Folder = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
        strict: bool = True,
        map_location: Any = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Go on with the training that `save_state` saved; the same objects must be prepared.

        The checkpoint is verified in full, and compared with all objects; only then do they change.
        A loader whose epoch was not complete goes on at its next sample. With another number of
        ranks than the run that saved it, generators stay as they are.

        Args:
            input_dir: the folder of the checkpoint. None: the newest, with
                `automatic_checkpoint_naming`.
            load_kwargs: nothing that it could hold is needed.
            allow_pickle: load registered objects that were pickled, which can run any code.
            strict: False: load the weights that both a model and the checkpoint have.
            map_location: without effect: everything goes where the live objects are.

        Raises:
            UsageError: there is no folder to load from. Or a `load_state_dict` has failed, and some
                objects have changed: the training has to be started anew.
            CheckpointError: the checkpoint is missing, damaged or hostile, or does not fit; raised
                on all ranks, and no object has changed, but for what a hook may have done.
        """
        _refuse_others(load_kwargs or {}, "load_state")
        _refuse_others(load_model_func_kwargs, "load_state")
        from headway.checkpoint.loading import load_checkpoint
        from headway.checkpoint.project import next_number
        from headway.checkpoint.saving import agree, on_rank_0
        from headway.training_state import Restoring, spread_as

        with in_phase("load_state"):
            if self._background is not None:
                self._background.wait_if_alone()
            meet("load_state(...)")
            self.wait_for_checkpoint()
            given, training = self._folder_to_load(input_dir), self._training()
            # as save_state does: some scripts make a temporary folder on each rank
            folder = Path(on_rank_0(lambda: str(given)))
            loaded = load_checkpoint(folder, spread_as(training))
            restoring = Restoring(
                loaded, training, folder, strict=strict, allow_pickle=allow_pickle
            )
            agree(restoring.check)
            if self.is_main_process and restoring.lacks_other_ranks:
                say(
                    f"note: rank 0 has saved {folder} alone; the other ranks' random number"
                    " generators stay as they are"
                )
            restoring.apply(self._models_to_load(folder, restoring.check_models))
        self._has_state = True
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            named_in = self._named_in("load_state")
            project.iteration = max(project.iteration, on_rank_0(lambda: next_number(named_in)))

    def _save_to(
        self, target: Path, allow_pickle: bool, *, wait: bool = True, then: Callable[[], object]
    ) -> None:
        """Save to `target`; rank 0 calls `then` once the checkpoint is there."""
        from headway.checkpoint.saving import Progress, prepare_checkpoint, write_prepared
        from headway.training_state import own_buffers_of

        def note_and_then(saved_at: float) -> None:
            self._known_saves.add(saved_at)
            then()

        self._refuse_unequal_weights()
        loader = self._training_loader()
        own_buffers = own_buffers_of(self._inner(self._all(torch.nn.Module)))
        prepared = prepare_checkpoint(
            target,
            lambda folder: self._state_to_save(folder, own_buffers, allow_pickle),
            Progress(
                self._steps_done(),
                0 if loader is None else loader.epoch,
                self._agreed_settings.began_at,
            ),
            then=note_and_then,
        )
        self._has_state = True
        if wait:
            write_prepared(prepared)
        else:
            self._begin_writing(prepared)

    def _steps_done(self) -> int:
        return max((one.step_count for one in self._all(PreparedOptimizer)), default=0)

    def _training_loader(self) -> PreparedDataLoader | None:
        """Return the loader in whose passes optimizers have stepped; before that the first one."""
        loaders = self._all(PreparedDataLoader)
        return next((one for one in loaders if one.has_trained), loaders[0] if loaders else None)

    def _note_equal_weights(self) -> None:
        """Note that ranks which train on their own have equal weights at this moment."""
        self._equal_at = self._optimizer_steps()

    def _refuse_unequal_weights(self) -> None:
        steps = self._optimizer_steps()
        if self._equal_at not in (None, steps):
            raise UsageError(
                "each rank has weights of its own until LocalSGD averages them, and a checkpoint"
                " has those of rank 0 for all",
                where="the script's save_state()",
                fix="save when local_sgd.num_steps is a multiple of local_sgd_steps, after"
                " local_sgd.step(); or after the context",
            )

    def _optimizer_steps(self) -> int:
        return sum(one.step_count for one in self._all(PreparedOptimizer))

    def _state_to_save(self, folder: Path, own_buffers: list[Any], allow_pickle: bool) -> Any:
        from headway.training_state import state_of

        weights = self._weights_to_save(folder)
        return state_of(self._training(), weights, own_buffers, allow_pickle=allow_pickle)

    def _training(self) -> Any:
        from headway.training_state import Training

        models = self._all(torch.nn.Module)
        return Training(
            self._inner(models),
            models,
            self._strategy,
            self._all(PreparedOptimizer),
            self._all(PreparedScheduler),
            self._all(PreparedDataLoader),
            self._registered,
            self._precision,
            self._accumulation,
            self._token_mean,
            self.device,
            self._skips_itself and not self._data.use_stateful_dataloader,
            self._global_batch_size,
        )

    def _named_in(self, method: str) -> Path:
        """Return the project folder, in which checkpoints are named automatically."""
        project_dir = self.project_configuration.project_dir
        if project_dir is None:
            raise UsageError(
                "automatic_checkpoint_naming needs a project_dir",
                where=f"the script's {method}()",
                fix="pass ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)",
            )
        return Path(project_dir).expanduser()

    def _next_folder(self, output_dir: Folder) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            return _given(output_dir, "save_state")
        from headway.checkpoint.project import numbered_folder

        folder = numbered_folder(self._named_in("save_state"), self.save_iteration)
        if os.path.lexists(folder):
            raise CheckpointError(
                "there is a checkpoint of this number, of another run or of an earlier one",
                where=str(folder),
                fix="go on from it with load_state(), or use another project_dir, or set"
                " accelerator.project_configuration.iteration",
            )
        return folder

    def _folder_to_load(self, input_dir: Folder) -> Path:
        if input_dir is not None or not self.project_configuration.automatic_checkpoint_naming:
            return _given(input_dir, "load_state")
        from headway.checkpoint.folders import FOLDER
        from headway.checkpoint.project import newest_in
        from headway.checkpoint.saving import on_rank_0

        parent = self._named_in("load_state") / FOLDER
        newest = on_rank_0(lambda: newest_in(parent))
        if newest is None:
            raise CheckpointError(
                "there is no checkpoint",
                where=str(parent),
                fix="call load_state() only where save_state() has been called before",
            )
        return newest


def _given(folder: Folder, method: str) -> Path:
    if folder is None:
        raise UsageError(
            f"{method}() got no folder, and checkpoints are not named automatically",
            where=f"the script's {method}()",
            fix=f"call {method}(folder), or pass Accelerator(project_config=ProjectConfiguration("
            "project_dir=..., automatic_checkpoint_naming=True))",
        )
    return Path(folder).expanduser()


def _refuse_others(keywords: dict[str, Any], method: str) -> None:
    for name in keywords:
        raise UsageError(
            f"{method}() does not take {name!r}",
            where=f"the script's {method}(...)",
            fix="remove it: models are saved and loaded as they are",
        )
