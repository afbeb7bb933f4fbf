"""Training loaders that end on all ranks together, see `Loaders`.

Lightning takes batches in this order: before batch i it asks all ranks for signals, which the flags
of batch i - 1 answer (`StopRequest`). Then it fetches. If a loader has no length, it fetches batch
i + 1 in order to know whether batch i is the last one. So a rank must know by then whether any rank
has batch i + 1, and has to fetch one more batch than Lightning does (`SharedEnd`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from lightning_dear import private_names
from lightning_dear.engine.shared_end import SharedEnd

_NO_BATCH = object()

_STATES = "lightning_dear_ranks"
"""Key of a saved loader, with the state of each rank's loader in rank order."""


class Loaders:
    """Makes training loaders end on all ranks after the same batch.

    A rank whose loader has ended gives its last batch again, until the loaders of all ranks have
    ended. Such a batch is a *repeat*, and weighs 0. So all ranks make the same collectives in each
    batch. The means that `self.log` makes over an epoch leave repeats out. Metrics and sums that
    user code keeps itself include them. So do values that hooks log before `training_step`.

    Lengths are exchanged whenever Lightning sets loaders up. If all ranks know theirs, nothing else
    is asked. Otherwise the flags of each round tell how many batches ranks have ahead, and ranks
    that have made no round since the last batch ask each other before the next one.

    Args:
        strategy: Strategy of the trainer.

    Attributes:
        strategy: Same as the argument.
        is_repeat: Whether the present batch is a repeat. False without loaders of this object.
        end: What ranks know of the end of the epoch.
        epoch: Takes batches for training at present. None before the first epoch, and with several
            loaders.
        resumed: State that was loaded for the next epoch; to be assigned to. None means none.
        fit_loop: Lightning's loop that takes the batches. None before loaders are set up.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy, self.is_repeat, self.end = strategy, False, SharedEnd()
        self.epoch: _Epoch | None = None
        self.resumed: tuple[Any, int] | None = None
        self.fit_loop: Any = None

    def shared(self, loader: Any) -> Any:
        """Returns a loader with the batches of `loader` that ends together with other ranks'.

        Returns `loader` itself outside of training. Collective. Blocks.

        Raises:
            ValueError: If only some ranks have no batch. On all ranks.
            TypeError: If `training_step` takes batches itself, from a `dataloader_iter`.
        """
        module = self.strategy.lightning_module
        if not module.trainer.training:
            return loader
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            raise TypeError(
                "With weights= a training_step cannot take batches from a dataloader_iter: ranks"
                " would not see which batch it takes. Use training_step(self, batch, batch_idx)."
            )
        self.epoch, self.resumed, self.is_repeat = None, None, False
        self.fit_loop, length = module.trainer.fit_loop, sized_len(loader)
        lengths = self.gathered(-1 if length is None else length)
        self.check(lengths)
        self.end.is_asked |= -1 in lengths
        self.end.lookahead = 1 if self.strategy.root_device.type == "cpu" else 2
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            return _StatefulLoader(loader, self, lengths)
        return loader if len(lengths) == 1 else TrainingLoader(loader, self, lengths)

    def gathered(self, number: int) -> list[int]:
        """Returns every rank's `number`, in rank order. Collective. Blocks."""
        told = torch.tensor([number], device=self.strategy.root_device)
        numbers: list[int] = self.strategy.all_gather(told).flatten().tolist()
        return numbers

    @staticmethod
    def check(numbers: Sequence[int]) -> None:
        """Raises ValueError if some ranks have no batch and others have. Local.

        Args:
            numbers: For each rank: 0 if it has no batch.
        """
        if any(numbers) and 0 in numbers:
            raise ValueError(
                f"The training loader of rank {numbers.index(0)} has no batch, and others have."
                " A rank repeats its last batch until all have ended, so it needs one. Give each"
                " rank at least one batch, or train with fewer ranks."
            )

    def begin(self, epoch: _Epoch) -> None:
        """Begins an epoch, whose batches training takes from now on. Local."""
        self.epoch, self.is_repeat = epoch, False
        results = private_names.EPOCH_RESULTS.of(self.fit_loop.epoch_loop)
        private_names.LOGGED_SIZE.restore_in(results)
        size = private_names.LOGGED_SIZE.of(results)

        def weight(*what: Any) -> Any:
            # `batch` is None outside of batches, such as in `on_train_epoch_end`. Lightning divides
            # the sum over ranks by their number, and rounds down.
            is_left_out = self.is_repeat and results.batch is not None
            return 0 if is_left_out else size(*what) * self.strategy.world_size

        private_names.LOGGED_SIZE.replace_in(results, weight)

    def begin_batch(self) -> None:
        """Tells that training begins the next batch. Local."""
        if self.epoch is not None:
            self.is_repeat = self.epoch.begin_batch()
            training = self.strategy.pipeline_of().training
            training.end, training.weights.is_repeat = self.end, self.is_repeat


class TrainingLoader:
    """A loader whose epochs have as many batches as on the rank with the most of them.

    Other attributes than those below are those of the loader inside, also to be assigned to, and
    `isinstance` finds that loader's class. Batches that are None are left out. If user code
    iterates over it, it gets this rank's own batches, and no rank waits.

    Args:
        inner: The loader inside.
        loaders: The strategy's.
        lengths: Number of batches of each rank's loader. -1 means that it is not known.

    Attributes:
        inner: Same as the argument.
        loaders: Same as the argument.
        length: Largest number of batches. None means that not all ranks know theirs.
        is_even: Whether the number is known and equal on all ranks, or there is one rank.
    """

    def __init__(self, inner: Any, loaders: Loaders, lengths: Sequence[int]) -> None:
        length = None if -1 in lengths else max(lengths)
        is_even = length == min(lengths) or len(lengths) == 1
        vars(self).update(inner=inner, loaders=loaders, length=length, is_even=is_even)

    def __getattr__(self, name: str) -> Any:
        # Protocols that look for special names, such as `copy`, get this object's own.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the loader inside, for `isinstance`."""
        return type(self.inner)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other training loader."""
        combined = private_names.COMBINED_LOADER.of(self.loaders.fit_loop)
        return combined is None or len(combined.flattened) == 1

    def __len__(self) -> int:
        # Lightning asks each loader before it takes a batch from any. Later errors would be hidden.
        if not (self.is_even or self.is_alone):
            raise ValueError(
                "With weights= and several training loaders (CombinedLoader), each must have a"
                " length, equal on all ranks: a batch cannot be repeated in part. Give all ranks"
                " equally many batches, or return one loader that gives batches of all data."
            )
        if self.length is None:
            raise TypeError("The number of batches is not known on all ranks.")
        length: int = self.length
        return length

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self) if self.is_alone else iter(self.inner)


class _StatefulLoader(TrainingLoader):
    """A `TrainingLoader` whose state is that of the last batch that was trained on."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all ranks' loaders. Collective. Blocks."""
        epoch, collectives = self.loaders.epoch, self.loaders.strategy.pipeline_of().collectives
        own = (self.inner.state_dict(), 0) if epoch is None else epoch.state()
        return {_STATES: collectives.all_gather_object(own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads this rank's state, or one that a plain loader has saved. Local.

        Warns if another number of ranks has saved it. The loader then begins its epoch anew.
        """
        strategy, states = self.loaders.strategy, state.get(_STATES)
        if states is None:
            self.inner.load_state_dict(state)
        elif len(states) == strategy.world_size:
            own, num_batches = states[strategy.global_rank]
            self.inner.load_state_dict(own)
            if num_batches < 0:
                # Reads the last batch, so that the next iterator begins an epoch.
                deque(self.inner, maxlen=0)
            else:
                self.loaders.resumed = own, num_batches
        else:
            rank_zero_warn(
                f"The checkpoint has the states of {len(states)} ranks' training loaders, and"
                f" {strategy.world_size} ranks train: loaders begin their epoch anew. Resume with"
                " as many ranks to go on behind the last batch."
            )


class _Epoch(Iterator[Any]):
    """The batches of one epoch on this rank: its own, then repeats of the last one.

    Args:
        loader: The loader. Its iterator is made at once.
    """

    def __init__(self, loader: TrainingLoader) -> None:
        self._loader, self._loaders, self._end = loader, loader.loaders, loader.loaders.end
        # Whether training takes the batches. None until the first one is taken.
        self._is_shared: bool | None = None
        # Own batches that were fetched and not given, and the last one that was given.
        self._queue: deque[Any] = deque()
        self._last: Any = _NO_BATCH
        # Own batches that were fetched, and batches that training has begun.
        self._num_own = self._num_begun = 0
        # Most batches that Lightning takes in an epoch.
        self._limit = math.inf
        # With None as a batch Lightning makes no step, so that other ranks would wait.
        self._own = (one for one in iter(loader.inner) if one is not None)
        self._state = getattr(loader.inner, "state_dict", lambda: None)
        resumed, self._loaders.resumed = self._loaders.resumed, None
        # Number of own batches that were fetched -> state of the loader after them. -1: before the
        # last batch of the training that is resumed, which has begun `_num_before` of this epoch.
        before, num_before = resumed or (self._state(), 0)
        self._num_before: int = num_before
        if num_before:
            self._last = next(self._own, _NO_BATCH)
        self._states = {-1: before, 0: self._state()}

    @override
    def __next__(self) -> Any:
        if self._is_shared is None:
            self._begin()
        if not self._is_shared:
            return next(self._own)
        end = self._end
        # The same on all ranks, since all have heard the same.
        if end.given == end.known and not end.is_final:
            end.hear(end.position, max(self._loaders.gathered(end.ahead)))
        if end.given == end.known:
            raise StopIteration
        self._fill(1)
        if self._queue:
            self._last = self._queue.popleft()
        elif self._last is _NO_BATCH:
            # Its length was wrong.
            rank = self._loaders.strategy.global_rank
            self._loaders.check([*[1] * rank, 0, 1])
        end.given += 1
        self._fill(0 if self._loader.length is not None else end.lookahead)
        return self._last

    def _begin(self) -> None:
        """Finds out whether training takes the batches. If so, is collective without a length."""
        loaders, end, length = self._loaders, self._end, self._loader.length
        combined = private_names.COMBINED_LOADER.of(loaders.fit_loop)
        taken = private_names.COMBINED_ITERATOR.of(combined) if combined is not None else None
        self._is_shared = taken is not None and taken.iterators[0] is self
        if not self._is_shared:
            return
        self._limit = combined.limits[0]
        loaders.begin(self)
        end.begin(None if length is None else max(length - self._num_before, 0))
        if length is None:
            self._fill(1 + end.lookahead)
            # -1 for a rank that goes on with repeats, which is not one without a batch.
            numbers = loaders.gathered(end.ahead or -int(self._last is not _NO_BATCH))
            loaders.check(numbers)
            end.hear(end.position, max(0, *numbers))

    def _fill(self, number: int) -> None:
        """Fetches own batches until there are `number` ahead, or no more are needed. Local."""
        most = min(number, self._limit - self._end.given)
        while len(self._queue) < most and (batch := next(self._own, _NO_BATCH)) is not _NO_BATCH:
            self._queue.append(batch)
            self._num_own += 1
            self._states[self._num_own] = self._state()
        self._end.ahead = len(self._queue)

    def begin_batch(self) -> bool:
        """Tells that training begins the next batch, and returns whether it is a repeat. Local."""
        self._num_begun += 1
        # If its training fails, the state before the batch before it is still needed.
        self._states.pop(min(self._num_begun, self._num_own) - 3, None)
        return self._num_begun > self._num_own

    def state(self) -> tuple[Any, int]:
        """Returns what is needed to go on behind the last batch that was trained on. Local.

        Returns:
            State of the loader before its last batch that was trained on, which may have to be
            repeated, and number of batches of the epoch. -1 means that all ranks have ended it.
        """
        progress = self._loaders.fit_loop.epoch_loop.batch_progress.current
        num_done = self._num_begun - (progress.ready > progress.processed)
        # If a limit has ended the epoch, the loader may have more batches, even without an end.
        has_ended = self._loader.length is not None or num_done < self._limit
        is_over = has_ended and self._end.is_final and num_done == self._end.known
        state = self._states[min(num_done, self._num_own) - 1]
        return state, -1 if is_over else self._num_before + num_done
