"""Weights of batches: a mean over samples instead of a mean over ranks (`BatchWeights`)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from lightning_dear.collectives.launch_log import WEIGHTS_TAG
from lightning_dear.collectives.work import Collectives, Work

MOST = 2**53
"""Largest weight of a batch. Up to it fp64 has all whole numbers."""

Waiting = Callable[[str], AbstractContextManager[None]]
"""Reason of a wait -> context that is entered around that wait."""


class BatchWeights:
    """Weights of this rank's batches, by which the step's mean gradient counts them.

    A step has m micro-batches on each rank; m is 1 without gradient accumulation. A micro-batch has
    the weight n, such as its number of samples, and its loss has the gradient g. Then the step uses

        m * sum(n * g) / sum(n),

    where both sums are over all micro-batches of all ranks. So it is the mean over samples of all
    ranks, times m, since torch adds up the gradients of micro-batches.

    The first weight of the step on this rank is n_0, or 1 if that is 0. The loss of each
    micro-batch is multiplied by `loss_factor`, n / n_0. Ranks exchange their sums of weights, each
    in fp64, before the first gradient is copied into a bucket. Each gradient is then multiplied by
    `scale`, m * n_0 / sum(n). If all weights of a step are equal that is exactly 1 / world size, as
    under DistributedDataParallel.

    A micro-batch of weight 0 does not count: what its backward adds to `.grad` is dropped.

    While it is off all ranks count alike: `own` is 1, `scale` is 1 / world size.

    Args:
        collectives: Launches the exchange.
        waiting: Reason -> context that is entered around the wait for it.

    Attributes:
        is_on: Whether batches have weights; to be assigned to before the first step.
        may_accumulate: Whether a step may have several micro-batches. False with several
            optimizers: their steps begin at different micro-batches. To be assigned to.
        is_repeat: Whether this rank has had the present batch before, and other ranks have more.
            Its weight is then 0, whatever is given; to be assigned to.
        holds_gradients: Returns whether an optimizer has gradients of this step that its own step
            has not used yet; to be assigned to.
        was_given: Whether the user has given any batch a weight other than 0.
        total: Sum of this rank's weights in all steps so far. With several optimizers, a batch
            counts once for each step that uses it.
    """

    def __init__(self, collectives: Collectives, waiting: Waiting) -> None:
        self._collectives, self._waiting = collectives, waiting
        self.is_on, self.may_accumulate = False, True
        self.is_repeat = self.was_given = False
        self.total = 0.0
        self.holds_gradients: Callable[[], bool] = bool
        # Whether the present batch is not counted yet, and whether it has no backward.
        self._is_new = self._has_no_loss = False
        self._given: float | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets the step's micro-batches, unless an optimizer still has their gradients. Local.

        Keeps the weight of a batch that had no backward yet: Lightning calls `zero_grad` between
        `training_step` and backward.
        """
        if self.holds_gradients():
            return
        self._counted: list[float] = []
        self._work: Work | None = None
        self._scale: float | Tensor = 0.0
        self._is_launched = self._is_scaled = False

    def end_step(self) -> None:
        """Forgets what a step has used. With several optimizers all may use one batch. Local."""
        self.total += self.own
        if self.may_accumulate and not self._is_new:
            self.forget()
        self.reset()

    # --- before backward ------------------------------------------------------------------------

    def weigh(self, weight: float, *, has_loss: bool = True) -> None:
        """Gives the present batch its weight. Local.

        Args:
            weight: From 0 to 2^53. With another number all ranks raise in the step.
            has_loss: False means that no backward of this batch follows. The batch still counts as
                one of the step's m micro-batches.
        """
        if self._is_new and self._has_no_loss:
            self._count()
        self._given, self._is_new, self._has_no_loss = weight, True, not has_loss

    def forget(self) -> None:
        """Forgets the present batch's weight: the next batch needs one of its own. Local."""
        self._given, self._is_new = None, False

    @property
    def _present(self) -> float | None:
        """Weight of the present batch. None means that it has none."""
        return 0.0 if self.is_repeat and self._given is not None else self._given

    def loss_factor(self) -> float:
        """Returns the factor of the present batch's loss, and counts the batch. Local.

        Raises:
            RuntimeError: If the batch has no weight, or if a weight comes too late for the step.
        """
        if not self.is_on:
            return 1.0
        self._count()
        # The gradients of weight 0 are dropped. Multiplied by 0, a loss of inf would become nan.
        factor = (self._present or self._first) / self._first
        return factor * float(self.scale) if self._is_scaled else factor

    def _count(self) -> None:
        """Counts the present batch in the step, unless it is counted already."""
        if self._present is None:
            raise RuntimeError(
                "This batch has no weight. Call strategy.weigh(n) for each batch, before its"
                " backward, and strategy.weigh(0) for one that has no backward. weights='samples'"
                " finds n itself only in a Trainer's automatic optimization."
            )
        if self._counted and not self._is_new:
            return
        if self._counted and not self.may_accumulate:
            raise RuntimeError(
                "With several optimizers, weights='samples' takes one weighed batch in each step."
                " Call step() or zero_grad() of each optimizer before the next batch is weighed:"
                " all optimizers use the same weights."
            )
        if self._is_launched:
            raise RuntimeError(
                "A batch was weighed after the step's gradients had been sent. Run all backwards"
                " but the step's last in `with trainer.strategy.block_backward_sync():` or"
                " `with fabric.no_backward_sync(model):`, or call zero_grad() before. The weights"
                " of all of the step's batches must be known before its first gradient is sent."
            )
        self._counted.append(self._present)
        self._is_new = False

    def refuse_plain(self) -> None:
        """Called when a plain `loss.backward()` makes a gradient.

        Raises:
            RuntimeError: If the loss would have been multiplied by a factor.
        """
        # Without a weighed batch nothing is checked: this rank may only look at the gradient.
        if self.is_on and self._is_new:
            self._count()
        if self._counted and self._counted[-1] != self._first:
            raise RuntimeError(
                f"A plain loss.backward() of a batch of weight {self._counted[-1]:g}, in a step"
                f" that begins with weight {self._counted[0]:g}. Call self.manual_backward(loss) or"
                " fabric.backward(loss): it multiplies the loss by the weight, and drops gradients"
                " of weight 0, such as those of a repeated batch. To look at a gradient, call"
                " torch.autograd.grad, which leaves .grad alone."
            )

    @contextmanager
    def dropping(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """A context around a backward. If the batch weighs 0, `.grad` is as before afterwards."""
        before = [] if self.counts else [(one, one.grad) for one in parameters]
        for one, _ in before:
            one.grad = None
        try:
            yield
        finally:
            for one, gradient in before:
                one.grad = gradient

    # --- the exchange ---------------------------------------------------------------------------

    def launch(self) -> None:
        """Launches the exchange of this step's weights, unless it was. Collective. Does not block.

        To be called before the step's first bucket is launched: NCCL needs one order of launches.
        """
        if not self.is_on or self._is_launched:
            return
        if self._is_new or not self._counted:
            self._count()
        collectives, self._is_launched = self._collectives, True
        # A weight that is not valid travels as it is, so that all ranks can name it.
        sent = next((one for one in self._counted if not 0 <= one <= MOST), self.own)
        if collectives.world.size == 1:
            self._hear([sent])
            return
        device = collectives.flags_device
        sums = torch.zeros(collectives.world.size, dtype=torch.float64, device=device)
        sums[collectives.world.rank] = sent
        if collectives.wait_blocks_host:
            work = collectives.launch_all_gather(sums, WEIGHTS_TAG)
            self._work = work.then(lambda: self._hear(sums.tolist()))
        else:
            self._check({collectives.world.rank: sent})
            with self._waiting("weights of batches"):
                collectives.launch_all_reduce(sums, WEIGHTS_TAG).wait()
            # On the stream from which backward begins, and for which its other streams wait.
            self._divide_by(sums.sum())

    def _hear(self, sums: Sequence[float]) -> None:
        self._check(dict(enumerate(sums)))
        self._divide_by(sum(sums))

    def _divide_by(self, total: float | Tensor) -> None:
        self._scale = len(self._counted) * self._first / total if self.own else 0.0

    @staticmethod
    def _check(sums: Mapping[int, float]) -> None:
        for rank, weight in sums.items():
            if not 0 <= weight <= MOST:
                who = f"Rank {rank}" if len(sums) > 1 else "This rank"
                raise ValueError(
                    f"{who}'s weight of a batch, or their sum in a step, is {weight:g}. Pass"
                    " strategy.weigh(n) a number from 0 to 2^53, such as the number of samples"
                    " or tokens that the loss is a mean over."
                )

    @property
    def scale(self) -> float | Tensor:
        """Factor of this rank's gradients. Blocks until the weights of all ranks have arrived.

        0 if this rank's weights are 0. On CUDA a scalar fp64 tensor, since to read a number would
        block the host.

        Raises:
            ValueError: If a rank has a weight that is not valid.
        """
        if not self.is_on:
            return 1.0 / self._collectives.world.size
        self.launch()
        self.finish()
        return self._scale

    def await_in(self, submit: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Lets another thread wait for the exchange, see `Work.await_in`. Local."""
        if self._work is not None:
            self._work.await_in(submit)

    @property
    def is_known(self) -> bool:
        """Whether `scale` is known not to block, after `launch`. True if no other thread waits."""
        return self._work is None or self._work.is_on_host

    def finish(self) -> None:
        """Waits for the exchange, if one was launched. Also if no gradient needs `scale`."""
        if self._work is not None:
            with self._waiting("weights of batches"):
                self._work.wait()
            self._work = None

    @torch.no_grad()
    def scale_alone(self, parameters: Iterable[nn.Parameter]) -> None:
        """Multiplies each `.grad` by `scale`, once a step. For ranks that use no buckets."""
        if self.is_on and not self._is_scaled and self.scale != 1.0:
            for one in parameters:
                if one.grad is not None:
                    one.grad.mul_(self.scale)
        self._is_scaled = self.is_on

    # --- this rank ------------------------------------------------------------------------------

    @property
    def counts(self) -> bool:
        """Whether the present batch counts: its weight is not 0, or batches have no weights."""
        return not self.is_on or self._present != 0

    @property
    def is_expecting(self) -> bool:
        """Whether the present batch has a weight, and its backward is still to come."""
        return self._is_new and not self._has_no_loss

    @property
    def own(self) -> float:
        """Sum of this rank's weights in this step. 1 if batches have no weights."""
        return sum(self._counted) if self.is_on else 1.0

    @property
    def num_batches(self) -> int:
        """Number of micro-batches of this step so far."""
        return len(self._counted)

    @property
    def _first(self) -> float:
        return self._counted[0] or 1.0
