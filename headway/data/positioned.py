"""Where the passes over a prepared loader stand, and how another loader goes on there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.contract.records import channel
from headway.data.configuration import DataLoaderConfiguration
from headway.data.position import (
    Interrupted,
    Pass,
    Passes,
    Pending,
    Taken,
    counts_samples,
    generators_of,
)
from headway.data.samplers import SeedableRandomSampler
from headway.data.seeds import SampleSeeds
from headway.data.sharding import batch_size_of, source_of
from headway.errors import CheckpointError


class PositionedLoader(DataLoader[Any]):
    """The part of a prepared loader that counts what it gives, and goes on at such a count.

    Attributes:
        _original: the script's loader.
        _of_rank: this rank, the number of ranks, and how data is shared out.
        _seeds: of samples, where `Accelerator(seed=...)` was given.
        _device: where batches go; None leaves them.
        _is_map: whether the data set is a map, read by torch's own loader.
    """

    _original: Any
    _of_rank: tuple[int, int, DataLoaderConfiguration]
    _seeds: SampleSeeds | None
    _device: torch.device | None
    _is_map: bool
    _passes: Passes

    @property
    def total_batch_size(self) -> int:
        """The number of samples in a full batch of all ranks together; 0 if that is not known."""
        _, num_ranks, config = self._of_rank
        return batch_size_of(self._original) * (1 if config.split_batches else num_ranks)

    @property
    def epoch(self) -> int:
        """The number of the pass that has begun and is not complete, or else of the next one."""
        current = self._passes.current
        return self._passes.following - (current is not None and not current.is_complete)

    @property
    def samples(self) -> int:
        """How many samples all ranks together have been given, in earlier runs as well.

        Batches whose sizes nobody knows in advance count as none.
        """
        current = self._passes.current
        return self._passes.samples + (0 if current is None else current.samples)

    @property
    def has_trained(self) -> bool:
        """Whether an optimizer has stepped in a pass, in earlier runs as well."""
        passes, current = self._passes, self._passes.current
        is_training = current is not None and current.num_steps != channel.num_steps
        return passes.has_trained or is_training

    @property
    def is_evaluated(self) -> bool:
        """Whether a pass has begun and is not complete, and none has trained, as in evaluations."""
        current = self._passes.current
        return current is not None and not current.is_complete and not self.has_trained

    def position(self) -> dict[str, Any]:
        """Return where the passes stand, for a checkpoint: values, and tensors of generators."""
        passes, current = self._passes, self._passes.current
        given = None if current is None else self._given(current)
        is_left = self._is_map and given == passes.left_after  # where the script left the last one
        position: dict[str, Any] = {
            "following": passes.following if is_left else self.epoch,
            "size": batch_size_of(self._original),
            "total": self.total_batch_size,
            "seed": None if self._seeds is None else self._seeds.seed,
            "generators": [one.get_state() for one in generators_of(self._sources())],
            "pass": None,
            "samples": self.samples,
            "has_trained": self.has_trained,
            "has_lasting_workers": passes.has_lasting_workers,
            "left_after": passes.left_after and [*passes.left_after],
            "order_seeds": [one.initial_seed for one in self._seedable()],
        }
        if current is not None and not current.is_complete and not is_left:
            state = current.state_dict()
            position["pass"] = {**state, "taken": [*(given or ())], "length": self._length()}
        return position

    def require_position(self, position: dict[str, Any], where: str) -> None:
        """Require that this loader can go on where another one was.

        Raises:
            CheckpointError: its data or its batches are others.
        """
        if position["pass"] is None:
            return
        for fact, saved, live, fix in self._facts_to_keep(position):
            if saved != live:
                raise CheckpointError(
                    f"a loader cannot go on in the middle of an epoch: its {fact} is {live} in this"
                    f" run, and {saved} in the checkpoint",
                    where=where,
                    fix=f"{fix}, or load a checkpoint from the end of an epoch",
                )

    def _facts_to_keep(self, position: dict[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
        """Yield what a pass needs to go on: its name, as it was saved, as it is, and the fix."""
        state, seed = position["pass"], position["seed"]
        live_seed = None if self._seeds is None else self._seeds.seed
        yield "seed", seed, live_seed, f"pass Accelerator(seed={seed})"
        if state["stream"] is not None:
            return
        same = "prepare the same loader"
        yield "number of samples", state["length"], self._length(), same
        if not self._is_map or not counts_samples(source_of(self._original)):
            yield "batch size", position["size"], batch_size_of(self._original), same
        per_round, read = max(self._taken(1).batches, 1), state["taken"][0]
        if not self._is_map and read % per_round:
            together = "number of batches that the ranks read together"
            yield together, f"{read} were read", per_round, same

    def go_on_at(
        self,
        position: dict[str, Any],
        generators: Interrupted,
        *,
        only_skipped: bool = False,
    ) -> None:
        """Let the next pass go on at a position.

        Args:
            position: what `position()` returned; `require_position` has accepted it.
            generators: those of this rank, for all loaders that go on.
            only_skipped: do so only if that pass is one over `without_first(...)`.
        """
        passes, state = self._passes, position["pass"]
        for generator, own in zip(
            generators_of(self._sources()), position["generators"], strict=False
        ):
            generator.set_state(own)
        passes.samples, passes.has_trained = position["samples"], position["has_trained"]
        passes.has_lasting_workers = position["has_lasting_workers"]
        left_after = position.get("left_after")
        passes.left_after = None if left_after is None else Taken(*left_after)
        for sampler, seed in zip(self._seedable(), position["order_seeds"], strict=False):
            sampler.initial_seed = seed
        passes.following = position["following"] if state is None else state["epoch"]
        passes.pending, passes.interrupted = None, generators
        if state is not None:
            passes.pending = Pending(state, only_skipped)
            reads_again = not (self._is_map or only_skipped or state["stream"] is not None)
            if reads_again and self._of_rank[0] == 0:
                print(_STREAM_NOTE, file=sys.stderr, flush=True)

    def began_with(self, position: dict[str, Any], other: PositionedLoader) -> bool:
        """Return whether the first pass may have been over where that of another loader ended.

        So it is with `zip`; a loop that goes on in it cannot be told from that.
        """
        state = position["pass"]
        if state is None or state["epoch"] != 0 or not self._is_map or not other._is_map:
            return False
        return bool(self._taken(len(other)).batches == state["taken"][0])

    def state_dict(self) -> dict[str, Any]:
        """Return where the passes stand; each rank keeps its own.

        `Accelerator.save_state` and `checkpoint` save it with the rest: this is for scripts that
        write checkpoints themselves.

        Examples:
            >>> loader = accelerator.prepare(DataLoader(range(4), batch_size=2))
            >>> for batch in loader:
            ...     state = loader.state_dict()
            ...     break
            >>> loader.load_state_dict(state)
            >>> [batch.tolist() for batch in loader]
            [[2, 3]]
        """
        return self.position()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass go on where `state_dict()` was called, in this run or another.

        Raises:
            CheckpointError: this loader's data or batches are others.
        """
        self.require_position(state_dict, "the script's load_state_dict(...)")
        self.go_on_at(state_dict, Interrupted(None, self._device or torch.device("cpu")))

    def _length(self) -> int | None:
        try:
            return len(self._original.dataset)
        except (AttributeError, TypeError, NotImplementedError):
            return None

    def _sources(self) -> list[Any]:
        """Return the loader, its samplers and its data set, each once."""
        dataset = getattr(self._original, "dataset", None)
        return _each_once([self._original, *self._samplers(), dataset])

    def _samplers(self) -> list[Any]:
        """Return what draws samples and batches, each once."""
        samplers = [getattr(self._original, one, None) for one in ("sampler", "batch_sampler")]
        return _each_once(samplers + [getattr(one, "sampler", None) for one in samplers])

    def _seedable(self) -> list[SeedableRandomSampler]:
        return [one for one in self._samplers() if isinstance(one, SeedableRandomSampler)]

    def _given(self, current: Pass) -> Taken:
        """Return what a pass has given, with what was left out of it."""
        since = self._taken(current.rounds)
        return Taken(*(one + other for one, other in zip(current.before, since, strict=True)))

    def _taken(self, rounds: int) -> Taken:
        _, num_ranks, config = self._of_rank
        batches = rounds * (1 if config.split_batches else num_ranks)
        return Taken(batches, batches * batch_size_of(self._original))


def _each_once(objects: list[Any]) -> list[Any]:
    return list({id(one): one for one in objects if one is not None}.values())


def tell_of_zipped(loaders: Sequence[PositionedLoader], positions: Sequence[Any]) -> None:
    """Say where a pass goes on that the script may have left, as `zip` does."""
    pairs = [*zip(loaders, positions, strict=True)]
    ended = [one for one, position in pairs if position["pass"] is None and one.epoch == 1]
    if any(one.began_with(position, other) for one, position in pairs for other in ended):
        print(_ZIP_NOTE, file=sys.stderr, flush=True)


_ZIP_NOTE = (
    "headway: note: saved in the last batch of a loader's first pass, in the middle of another's,"
    " which goes on from there; if the script reads the two with zip, save after that loop instead"
)
_STREAM_NOTE = (
    "headway: the data set is a stream without state_dict(), or is read by workers, so the batches"
    " before the checkpoint are read and dropped; the others are the same only if it gives the same"
    " samples again"
)
