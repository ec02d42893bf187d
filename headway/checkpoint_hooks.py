"""The Accelerator's methods by which scripts add to checkpoints: registered objects, and hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from headway.errors import UsageError
from headway.preparing import Preparing


class CheckpointHooks(Preparing):
    """A rank whose checkpoints hold what the script registers, and call its hooks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._registered: list[Any] = []
        self._save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Let checkpoints hold the states of these objects, as they are on rank 0.

        Args:
            objects: each with `state_dict()`, which returns tensors, numbers, strings, and lists,
                tuples and dicts of these, and `load_state_dict(state)`.

        Raises:
            UsageError: one has no such methods; then none is registered.

        Examples:
            >>> accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(
            ...     torch.nn.Linear(2, 1)))
        """
        for obj in objects:
            if not all(hasattr(obj, name) for name in ("state_dict", "load_state_dict")):
                raise UsageError(
                    f"a {type(obj).__name__} has no state_dict() and load_state_dict()",
                    where="the script's register_for_checkpointing(...)",
                    fix="give its class these two methods",
                )
        self._registered.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Let every `save_state` call `hook(models, weights, output_dir)` on every rank.

        Args:
            hook: gets the models as they were before `prepare`, their state dicts, and the folder
                in which the checkpoint is being written, to which it may add files. The entries
                that it removes from the list `weights`, or puts into it, are not saved or saved as
                on rank 0.

        Returns:
            A handle, whose `remove()` takes the hook away.

        Examples:
            >>> from pathlib import Path
            >>> def note(models, weights, output_dir):
            ...     _ = (Path(output_dir) / "note.txt").write_text(f"{len(models)} models")
            >>> handle = accelerator.register_save_state_pre_hook(note)
            >>> handle.remove()
        """
        return _register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Let every `load_state` call `hook(models, input_dir)` on every rank, before it loads.

        Args:
            hook: gets the models as they were before `prepare`, and the folder of the checkpoint,
                which has been verified. The models that it removes from the list are not loaded.

        Returns:
            A handle, whose `remove()` takes the hook away.

        Examples:
            >>> handle = accelerator.register_load_state_pre_hook(lambda models, input_dir: None)
            >>> handle.remove()
        """
        return _register(self._load_hooks, hook)

    def _weights_to_save(self, folder: Path) -> list[dict[str, Any]]:
        """Return the weights of all models, as the hooks leave them."""
        from headway.checkpoint.saving import agree
        from headway.training_state import chosen_by_rank_0

        models = self._inner(self._all(torch.nn.Module))
        before = [self._strategy.own_state_dict(one) for one in models]
        weights = [*before]

        def call_hooks() -> None:
            for hook in self._save_hooks.values():
                hook(models, weights, str(folder))

        if self._save_hooks:
            agree(call_hooks)
            weights = chosen_by_rank_0(weights, before)
        return weights

    def _models_to_load(self, folder: Path, check: Callable[[Any], None]) -> list[torch.nn.Module]:
        """Return the models that the hooks leave to be loaded.

        Args:
            check: refuses models that the checkpoint does not fit; every rank agrees on it.
        """
        from headway.checkpoint.saving import agree

        models = self._inner(self._all(torch.nn.Module))
        for hook in self._load_hooks.values():
            hook(models, str(folder))
        agree(lambda: check(models))
        return models

    def _inner(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        return [self.unwrap_model(one, keep_torch_compile=False) for one in models]


def _register(hooks: OrderedDict[int, Callable[..., Any]], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
