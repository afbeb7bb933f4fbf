"""Training loaders that end on all ranks together, see `Loaders`.

Lightning takes batches in this order: before batch i it asks all ranks for signals, which the flags
of batch i - 1 answer (`StopRequest`). Then it fetches. If a loader has no length, it fetches batch
i + 1 in order to know whether batch i is the last one. So a rank must know by then whether any rank
has batch i + 1, and has to fetch one more batch than Lightning does (`SharedEnd`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from lightning_dear import private_names
from lightning_dear.collectives.store import from_all_ranks
from lightning_dear.engine.shared_end import SharedEnd

_STATES = "lightning_dear_ranks"
"""Key of a saved loader, with the state of each rank's loader in rank order."""

_WITHOUT_BATCH = (
    "The training loader of rank {} has no batch, and others have. A rank repeats its last batch"
    " until all have ended, so it needs one. Give each rank at least one batch, or train with fewer"
    " ranks."
)


class Loaders:
    """Makes training loaders end on all ranks after the same batch.

    A rank whose loader has ended gives its last batch again, until the loaders of all ranks have
    ended. Such a batch is a *repeat*, and weighs 0. So all ranks make the same collectives in each
    batch. The means that `self.log` makes over an epoch leave repeats out. Metrics and sums that
    user code keeps itself include them. So do values that hooks log before `training_step`.

    Ranks exchange the lengths of their loaders whenever Lightning sets loaders up. If all ranks
    know theirs, nothing else is asked. Otherwise the flags of each round tell how many batches
    ranks have ahead. Ranks that have made no round since the last batch ask each other before the
    next one.

    Args:
        strategy: Strategy of the trainer.
        trains_alone: Whether ranks may train steps without a message, see `local_steps`.

    Attributes:
        strategy: Same as the argument.
        is_repeat: Whether the present batch is a repeat.
        epoch: The iterator from which training takes its batches; to be assigned to. None before
            the first batch, and with several loaders.
        fit_loop: Lightning's loop that takes the batches. None before loaders are set up.
    """

    def __init__(self, strategy: Any, *, trains_alone: bool = False) -> None:
        self._trains_alone = trains_alone
        self.strategy, self.is_repeat = strategy, False
        self.epoch: _Epoch | None = None
        self.fit_loop: Any = None

    def shared(self, loader: Any) -> Any:
        """Returns a loader with the batches of `loader` that ends together with other ranks'.

        Returns `loader` itself outside of training. Collective. Blocks.

        Raises:
            ValueError: If only some ranks have no batch, or if a loader has no length and ranks
                train alone. On all ranks.
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
        self.epoch, self.is_repeat, self.fit_loop = None, False, module.trainer.fit_loop
        self._weigh_logged_values()
        length = sized_len(loader)
        lengths = numbers_of_ranks(-1 if length is None else length)
        if -1 in lengths and len(lengths) > 1 and self._trains_alone:
            raise ValueError(
                f"The training loader of rank {lengths.index(-1)} has no length. With local_steps"
                " and weights= each needs __len__: ranks exchange too seldom to tell each other"
                " where an epoch ends."
            )
        is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        return (_StatefulLoader if is_stateful else TrainingLoader)(loader, self, lengths)

    def _weigh_logged_values(self) -> None:
        """Makes the means of an epoch that `self.log` makes leave repeats out. Local."""
        results = private_names.EPOCH_RESULTS.of(self.fit_loop.epoch_loop)
        size = private_names.LOGGED_SIZE.of(type(results))

        def weight(*what: Any) -> Any:
            # `batch` is None outside of batches, such as in `on_train_epoch_end`. Lightning divides
            # the sum of sizes over ranks by the number of ranks, and rounds down.
            is_left_out = self.is_repeat and results.batch is not None
            return 0 if is_left_out else size(results, *what) * self.strategy.world_size

        private_names.LOGGED_SIZE.replace_in(results, weight)

    def begin_batch(self) -> None:
        """Tells that training begins the next batch. Local."""
        training = self.strategy.pipeline_of().training
        if (epoch := self.epoch) is not None:
            epoch.num_begun += 1
            self.is_repeat = epoch.num_begun > epoch.num_own
            training.end = epoch
        training.weights.is_repeat = self.is_repeat


def numbers_of_ranks(number: int) -> list[int]:
    """Returns every rank's `number`, in rank order. Collective. Blocks.

    Raises:
        ValueError: If some ranks have 0, which means no batch, and others have not.
    """
    numbers = from_all_ranks(number)
    if any(numbers) and 0 in numbers:
        raise ValueError(_WITHOUT_BATCH.format(numbers.index(0)))
    return numbers


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
        lengths: Same as the argument.
    """

    def __init__(self, inner: Any, loaders: Loaders, lengths: Sequence[int]) -> None:
        vars(self).update(inner=inner, loaders=loaders, lengths=lengths)

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

    def __len__(self) -> int:
        # Lightning asks each loader before it takes a batch from any. Later errors would be hidden.
        combined = private_names.COMBINED_LOADER.of(self.loaders.fit_loop)
        is_unequal = len(self.lengths) > 1 and (-1 in self.lengths or len({*self.lengths}) > 1)
        if is_unequal and len(combined.flattened) > 1:
            raise ValueError(
                "With weights= and several training loaders (CombinedLoader), each must have a"
                " length, equal on all ranks: a batch cannot be repeated in part. Give all ranks"
                " equally many batches, or return one loader that gives batches of all data."
            )
        if -1 in self.lengths:
            raise TypeError("The number of batches is not known on all ranks.")
        return int(max(self.lengths))

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self)


class _StatefulLoader(TrainingLoader):
    """A `TrainingLoader` whose state is that of the last batch that was trained on."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all ranks' loaders. Collective. Blocks."""
        epoch = self.loaders.epoch
        own = (self.inner.state_dict(), 0) if epoch is None else epoch.state()
        return {_STATES: from_all_ranks(own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads this rank's state, or one that a plain loader has saved. Local.

        Warns if another number of ranks has saved it. The loader then begins its epoch anew.
        """
        strategy = self.loaders.strategy
        states = state.get(_STATES, [(state, 0)] * strategy.world_size)
        if len(states) == strategy.world_size:
            own, num_batches = states[strategy.global_rank]
            self.inner.load_state_dict(own)
            if num_batches < 0:
                # Reads the last batch, so that the next iterator begins an epoch.
                list(self.inner)
            else:
                vars(self)["resumed"] = own, num_batches
        else:
            rank_zero_warn(
                f"The checkpoint has the states of {len(states)} ranks' training loaders, and"
                f" {strategy.world_size} ranks train: loaders begin their epoch anew. Resume with"
                " as many ranks to go on behind the last batch."
            )


class _Epoch(SharedEnd, Iterator[Any]):
    """The batches of one epoch on this rank: its own, then repeats of the last one.

    If user code takes them, there are no repeats.

    Args:
        loader: The loader. Its iterator is made at once.

    Attributes:
        num_own: Number of own batches that were fetched, or that a resumed training had begun.
        num_begun: Number of batches that training has begun; to be assigned to.
    """

    def __init__(self, loader: TrainingLoader) -> None:
        self._loaders, lengths = loader.loaders, loader.lengths
        # With None as a batch Lightning makes no step, so that other ranks would wait.
        self._own = (one for one in iter(loader.inner) if one is not None)
        self._state = getattr(loader.inner, "state_dict", lambda: None)
        # If training is resumed: the state before the last batch that was trained on, which may
        # have to be repeated, and how many batches of this epoch were trained on.
        before, number = vars(loader).pop("resumed", None) or (self._state(), 0)
        on_cpu = self._loaders.strategy.root_device.type == "cpu"
        lookahead = 0 if -1 not in lengths else 1 if on_cpu else 2
        super().__init__(0 if lookahead else max(lengths), lookahead, not lookahead, number)
        # The last own batch that was given, or None, and those that were fetched after it.
        self._batches = [next(self._own, None) if number else None]
        # States of the loader after each own batch. Only the last ones are kept.
        self._states = [before, self._state()]
        self.num_own = self.num_begun = self._limit = number

    @override
    def __next__(self) -> Any:
        loaders, batches = self._loaders, self._batches
        combined = private_names.COMBINED_LOADER.of(loaders.fit_loop)
        taken = private_names.COMBINED_ITERATOR.of(combined)
        if taken is None or taken.iterators != [self]:
            return next(self._own)
        if loaders.epoch is not self:
            loaders.epoch, loaders.is_repeat = self, False
            # Lightning takes no more batches than that.
            self._limit = self.given + combined.limits[0]
        most = min(1 + self.lookahead, self._limit - self.given)
        while len(batches) <= most and (batch := next(self._own, None)) is not None:
            batches.append(batch)
            # Lightning and this object have at most 4 batches ahead of the one that is trained on.
            self._states = [*self._states[-7:], self._state()]
            self.num_own += 1
        # The same on all ranks, since all have heard the same.
        if self.given >= self.known and not self.is_final:
            # -1 means that the rank goes on with repeats, and is not one without a batch.
            numbers = numbers_of_ranks(len(batches) - 1 or -(batches[0] is not None))
            self.hear(self.given, max(0, *numbers))
        if self.given >= self.known:
            raise StopIteration
        if len(batches) > 1:
            del batches[0]
        elif batches[0] is None:
            # The loader's length was wrong. Only this rank knows.
            raise ValueError(_WITHOUT_BATCH.format(loaders.strategy.global_rank))
        self.given, self.ahead = self.given + 1, len(batches) - 1
        return batches[0]

    def state(self) -> tuple[Any, int]:
        """Returns what is needed to go on behind the last batch that was trained on. Local.

        Returns:
            State of the loader before its last batch that was trained on, which may have to be
            repeated, and number of batches of the epoch. -1 means that all ranks have ended it.
        """
        progress = self._loaders.fit_loop.epoch_loop.batch_progress.current
        num_done = self.num_begun - (progress.started > progress.processed)
        # If a limit has ended the epoch, a loader without a length may have more batches.
        is_limited = self.lookahead and num_done == self._limit
        is_over = self.is_final and num_done == self.known and not is_limited
        return self._states[-2 - max(self.num_own - num_done, 0)], -1 if is_over else num_done
