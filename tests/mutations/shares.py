"""What owners' shares of k must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation
from tests.mutations.sparse_sums import FIGURES, REFERENCE

SHARES = [
    Mutation(
        "shares of k by what has reached the threshold",
        "Shares.after",
        "        weights = [report.num_reached for report in reports]\n",
        "        weights = [1 for report in reports]\n",
        REFERENCE,
    ),
    Mutation(
        "shares of another density's k in a checkpoint",
        "RegionBucket.steer",
        "        if size == self._size:\n",
        "        if True:\n",
        ("tests/exchange/test_oktopk_resumed.py::test_a_run_resumed_with_another_density_keeps_k",),
    ),
    Mutation(
        "shares of another density's k",
        "RegionBucket._make_room",
        "        self.shares = layout.Shares.unknown(self._world_size)\n",
        "",
        (f"{FIGURES}::test_never_more_than_k_come_back_whatever_the_density_was",),
    ),
    Mutation(
        "shares of the step that ends when another density begins",
        "RegionBucket._hear",
        "        if self._follows_shares:\n",
        "        if True:\n",
        (f"{FIGURES}::test_never_more_than_k_come_back_whatever_the_density_was",),
    ),
    Mutation(
        "shares that ranks disagree on after a density that was in use for no step",
        "RegionBucket._hear",
        "        if self._follows_shares:\n",
        "        if self._settled == self.selection:\n",
        (
            "tests/exchange/test_codec_changes.py::test_ranks_agree_whether_messages_arrive_before_a_change_or_after",
        ),
    ),
]
