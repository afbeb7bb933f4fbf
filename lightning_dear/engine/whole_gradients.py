"""Whole mean gradients in `.grad`, as DistributedDataParallel leaves them there."""

import torch

from lightning_dear.engine.bucket_round import BucketRound, of_any_rank


class WholeGradients:
    """Gathers the means of all shards into `.grad`, and takes them back with the user's changes.

    `MeanGradient` calls it, between a finished round and the step.

    Args:
        bucket_round: The round that has reduced the means. Mutated: gradients and means of its
            buckets, `used` and `has_means`.
    """

    def __init__(self, bucket_round: BucketRound) -> None:
        self._flat, self._round = bucket_round.flat, bucket_round
        self._exchange, self._waiting = bucket_round.exchange, bucket_round.waiting

    def expose(self) -> None:
        """Puts the whole mean gradient of each parameter into its `.grad`. Collective, blocks.

        `.grad` becomes None if no rank had a gradient for the parameter. Afterwards changes to
        `.grad` count: the next `conceal`, or the next round after another backward, reads it.
        """
        buckets = self._flat.buckets
        for bucket in buckets:
            if bucket.role.has_master:
                bucket.gradients[bucket.own].copy_(bucket.mean)
        works = [self._exchange.launch_gather_gradients(bucket) for bucket in buckets]
        with self._waiting("whole gradients"):
            for work in works:
                work.wait()
        self.show()

    def show(self) -> None:
        """Puts views of `Bucket.gradients` into `.grad`, whose values it does not change. Local.

        To be called while these buffers hold the whole mean, such as after `expose`. Does nothing
        for parameters without a gradient buffer (world size 1 without a compressor).
        """
        self._round.has_means = False
        for used, placement in zip(self._round.used, self._flat.placements, strict=True):
            if placement.gradient is not None:
                placement.parameter.grad = placement.gradient.detach() if used else None

    @torch.no_grad()
    def conceal(self) -> None:
        """Takes exposed gradients back from `.grad`, with the user's changes. Collective, blocks.

        Afterwards `.grad` is None. A parameter counts as used if any rank had a `.grad` for it. If
        some ranks had none, those ranks keep the mean that was exposed.
        """
        self._round.has_means = True
        collectives, placements = self._exchange.collectives, self._flat.placements
        # A maximum over ranks, since a hook may have cleared a `.grad` on some ranks only.
        used = of_any_rank([one.parameter.grad is not None for one in placements], collectives)
        for index, placement in enumerate(placements):
            gradient, home = placement.parameter.grad, placement.gradient
            is_used = bool(used[index]) and (home is not None or gradient is not None)
            self._round.used[index] = is_used
            if home is None:
                continue
            if gradient is not None and gradient.data_ptr() != home.data_ptr():
                home.copy_(gradient)
            placement.parameter.grad = None
        for bucket in self._flat.buckets:
            bucket.adopt_gradients()
        self._exchange.look_again()
        self._exchange.note_used(self._round.used, keeps=False)
