"""What a folder of local steps has of each rank, and that it is taken over."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

STATE = "tests/lightning/test_local_state.py"
BITS = f"{STATE}::test_a_folder_goes_on_bit_for_bit[2-4-3-numbers4]"
WITH = f"{STATE}::test_so_does_one_with"
AGAIN = f"{STATE}::test_what_is_saved_again_is_the_same"
OTHERS = f"{STATE}::test_others_go_on_from_the_anchor"

LOCAL_STATE = [
    Mutation(
        "the replica in a folder",
        "local_steps.local_state:resume",
        '        fragment.write_replica(own["replica"])\n',
        "",
        (BITS,),
    ),
    Mutation(
        "the inner state in a folder",
        "local_steps.local_state:resume",
        "        part.load_inner(state)\n",
        "        pass\n",
        (BITS,),
    ),
    Mutation(
        "the steps that a folder has counted",
        "local_steps.local_state:resume",
        "        part.begin(progress)\n",
        "        part.begin()\n",
        (BITS,),
    ),
    Mutation(
        "the samples of a round that a folder has counted",
        "OptimizerRounds.begin",
        "        self._totals.extend(self._weights.total + one for one in since)\n",
        "        self._totals.append(self._weights.total)\n",
        ("tests/lightning/test_local_weights.py::test_a_folder_goes_on_bit_for_bit",),
    ),
    Mutation(
        "the buffers of a rank in a folder",
        "local_steps.local_state:resume",
        "        buffers[name].copy_(value)\n",
        "        pass\n",
        (f"{WITH}[2-own buffers]",),
    ),
    Mutation(
        "16-bit parameters follow a replica that was read",
        "local_steps.local_state:resume",
        "        part.publish()\n",
        "        pass\n",
        (f"{WITH}[2-bf16]",),
    ),
    Mutation(
        "a folder with other weights is gone on with from the anchor",
        "local_steps.local_state:resume",
        ' and local["weights"] == _hash_of(parts)',
        "",
        (OTHERS,),
    ),
    Mutation(
        "rank 0 alone writes the inner state of a folder",
        "keep_ranks_apart",
        "    if rank and states:\n",
        "    if False:\n",
        (OTHERS,),
    ),
    Mutation(
        "an exchange under way is stepped with the anchor in its place",
        "Fragment.spread",
        "            self.swap()\n            self.step()\n            self.swap()\n",
        "            self.step()\n",
        (f"{WITH}[2-int8]",),
    ),
    Mutation(
        "residuals of an exchange that was stepped",
        "Fragment.step",
        "        self._exchange.commit()\n",
        "",
        (f"{WITH}[2-int8]",),
    ),
    Mutation(
        "masters of an exchange that was stepped",
        "Fragment.spread",
        "            stepper.note_written()\n",
        "            pass\n",
        (f"{STATE}::test_an_outer_optimizer_without_state_goes_on",),
    ),
    Mutation(
        "random numbers of a gather that is sent again",
        "Fragment.resume",
        'max(0, coded.counts["gather"] - 1)',
        'coded.counts["gather"]',
        (AGAIN,),
    ),
    Mutation(
        "the state of the last merge while an exchange is under way",
        "Fragment.resume",
        "            self._stepped, stepper.shards = stepper.shards, last\n",
        "            self._stepped = stepper.shards\n",
        (AGAIN,),
    ),
    Mutation(
        "outer options are those of the fit",
        "Fragment.resume",
        "            group.update(own)\n",
        "            pass\n",
        (f"{STATE}::test_options_of_the_outer_optimizer_are_those_of_the_fit",),
    ),
    Mutation(
        "masters of an outer optimizer that has not stepped",
        "Fragment.resume",
        '{**state, "state": without_masters(state["state"])}',
        "state",
        (f"{STATE}::test_an_outer_optimizer_goes_on_before_its_first_step",),
    ),
    Mutation(
        "masters of a folder are loaded",
        "Fragment.resume",
        "            if MASTER_KEY in own:\n",
        "            if False:\n",
        (f"{WITH}[2-int8]", f"{STATE}::test_an_outer_optimizer_without_state_goes_on"),
    ),
    Mutation(
        "another class of outer optimizer is refused",
        "OuterHalf.load",
        "        check_class(self._outer, saved[_OUTER + model],",
        "        print(",
        (f"{STATE}::test_another_outer_optimizer_is_refused",),
    ),
    Mutation(
        "an exchange that is left out stays so",
        "Fragment.resume",
        'saved["sent_at"], saved["bad"]',
        'saved["sent_at"], 0',
        (f"{STATE}::test_an_exchange_that_is_left_out_stays_so",),
    ),
    Mutation(
        "masters of a folder before the first step",
        "OptimizerRounds._replica",
        "Value(self._masters.get(one, one.data))",
        "Value(one.data)",
        (f"{WITH}[2-bf16]", f"{STATE}::test_masters_are_saved_before_the_first_step"),
    ),
    Mutation(
        "loss scales of the ranks",
        "LocalStepsOption.load",
        '            precision.load_state_dict(own["precision"])\n',
        "            pass\n",
        (f"{WITH}[2-scaler]",),
    ),
    Mutation(
        "a rank reads its own local state",
        "checkpoint.folder:_wanted",
        "        if not name.startswith(ours[0]) or name.startswith(ours[1])\n",
        "        if True\n",
        (OTHERS,),
    ),
    Mutation(
        "other numbers of ranks read no local state",
        "checkpoint.folder:_wanted",
        'reader is None or len(local["ranks"]) != reader[1]',
        "reader is None",
        (OTHERS,),
    ),
]
