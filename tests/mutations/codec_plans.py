"""What plans with a compressor must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PREDICT = "tests/planning/test_predict.py"
PROGRAMME = "tests/planning/test_programme.py"
PADDING = "tests/planning/test_padding.py"
PROBE = "tests/tuning/test_codec_probe.py"
TUNING = "tests/tuning/test_tuning.py"
RESUMED = "tests/callbacks/test_fusion_tuner.py"

BY_HAND = f"{PREDICT}::test_a_step_that_encodes_by_hand"
EXACT = f"{PROGRAMME}::test_exact_with_a_codec"

CODEC_PLANS = [
    Mutation(
        "a found plan from the first step on",
        "PlanLifecycle.start",
        "        found = None if self.find_plan is None else self.find_plan(tensors)\n",
        "        found = None\n",
        (f"{RESUMED}::test_a_run_resumed_with_a_compressor_has_the_same_bits",),
    ),
    Mutation(
        "plans where the programme finds none",
        "MergeCompFusion.best_plan",
        " if plans else before\n",
        "\n",
        (f"{PROGRAMME}::test_where_no_way_is_short_enough_simple_plans_remain",),
    ),
    Mutation(
        "encodings that delay later gradients",
        "Run._compute",
        "            self._delay_s += op.seconds\n",
        "            self._delay_s = op.seconds\n",
        (BY_HAND,),
    ),
    Mutation(
        "delays that stay where what comes later is in time",
        "Run._wait",
        "        self._delay_s = max(self._delay_s, end_s - self._due_s)\n",
        "        self._delay_s = end_s - self._due_s\n",
        (BY_HAND,),
    ),
    Mutation(
        "how long what is ahead in forward decodes",
        "Course.extended",
        "np.maximum(rows[:, LATE], after[:, DECODED] - first_use_s)",
        "np.maximum(rows[:, LATE], decode_s - first_use_s)",
        (EXACT,),
    ),
    Mutation(
        "counting what fills a bucket up",
        "Course._cost_s",
        "        padded = aligned(self._aligned[end] - self._aligned[begin], self.unit_bytes)\n",
        "        padded = self._aligned[end] - self._aligned[begin]\n",
        (PADDING,),
    ),
    Mutation(
        "stepping no padding",
        "PlannedStep.__post_init__",
        "        self.stepped_bytes = [bucket.stepped_bytes for bucket in self.plan.buckets]\n",
        "        self.stepped_bytes = [bucket.nbytes for bucket in self.plan.buckets]\n",
        (PADDING,),
    ),
    Mutation(
        "comparing ways by the encodings so far",
        "_unbeaten",
        "        is_beaten = np.all(rows >= rows[0], axis=1)\n",
        "        is_beaten = np.all(rows[:, :2] >= rows[0, :2], axis=1)\n",
        (EXACT,),
    ),
    Mutation(
        "planning uncompressed buckets",
        "planning.predicting:_plan_of",
        "    return replace(plan, uncompressed=tuple(uncompressed))\n",
        "    return plan\n",
        (f"{PROGRAMME}::test_what_is_cheap_to_send_and_dear_to_encode_stays_uncompressed",),
    ),
    Mutation(
        "leaving encoding out of the times",
        "StepTimer.leaving_out_codecs",
        "            if device_work_s() > before_s:\n",
        "            if device_work_s() < before_s:\n",
        (f"{PROBE}::test_a_measured_step_is_without_encoding",),
    ),
    Mutation(
        "counting encoding as the device's in a replay",
        "Waiter.wait",
        "            self._host_s += gap_s - device_s\n"
        "        self._free_s = max(self._free_s, self._host_s) + device_s + seconds\n",
        "            self._host_s += gap_s\n"
        "        self._free_s = max(self._free_s, self._host_s) + seconds\n",
        ("tests/workloads/test_replay_waiter.py",),
    ),
    Mutation(
        "knowing what is charged from standing still",
        "Waiter._busy_s",
        "        return self.work_clock() + self.charged_clock()\n",
        "        return self.work_clock()\n",
        ("tests/workloads/test_replay_waiter.py",),
    ),
    Mutation(
        "counting what starting messages costs",
        "tuning:_cost",
        "alpha=encode.alpha + launches_s[0])",
        "alpha=encode.alpha)",
        (f"{PROBE}::test_starting_messages_costs_every_bucket_the_same",),
    ),
    Mutation(
        "timing the sum of what adds up",
        "_SilentCollectives.launch_reduce_scatter",
        "        return Work(lambda: None, partial(sum_in_source_order, [own, *others], out))\n",
        "        return Work(lambda: None)\n",
        (
            "tests/exchange/test_summable.py::test_the_cost_is_that_of_a_sum_and_of_decoding_one_row",
        ),
    ),
    Mutation(
        "adding what no cost shows",
        "StepModel.predict",
        "Prediction(run.clock_s + self.codecs.unseen_s, ",
        "Prediction(run.clock_s, ",
        (f"{TUNING}::test_what_no_cost_shows_is_learnt_from_the_starting_plan",),
    ),
    Mutation(
        "letting other plans say what a step takes",
        "MergeCompSearch.expected_s",
        "        others = [other for other in measured if other is not plan]\n",
        "        others = measured\n",
        (
            "tests/planning/test_mergecomp_search.py"
            "::test_a_plans_own_measurement_does_not_tell_what_it_is_expected_to_take",
        ),
    ),
    Mutation(
        "leaving out a start that has the buckets of a measured plan",
        "MergeCompSearch.expected_s",
        "        if start is not None and not any(map(start.has_buckets_of, (plan, *measured))):\n",
        "        if start is not None:\n",
        (
            "tests/planning/test_mergecomp_search.py"
            "::test_a_start_with_the_buckets_of_a_measured_plan_tells_nothing_more",
        ),
    ),
    Mutation(
        "measuring what needs no compressor",
        "_simpler_plans",
        "    if model.codecs.may_mix:\n        threshold",
        "    if False:\n        threshold",
        (
            "tests/planning/test_mergecomp_search.py"
            "::test_what_needs_no_compressor_is_measured_where_it_is_allowed",
        ),
    ),
    Mutation(
        "counting what the costs are fitted to among the plans that tell",
        "MergeCompFusion.search_for",
        "        return MergeCompSearch(best, others, model.step_s, model.codecs.fitted_to)\n",
        "        return MergeCompSearch(best, others, model.step_s)\n",
        (
            "tests/planning/test_mergecomp_search.py::test_the_starting_plan_counts_among_those_that_tell",
        ),
    ),
    Mutation(
        "leaving scheduled steps out of what no cost shows",
        "OptimizerPipeline.uses_configured_compressor",
        "        return self.plans.compressor in (None, self._training.options.compressor)\n",
        "        return True\n",
        (f"{PROBE}::test_who_plans_knows_whether_a_schedule_is_at_work",),
    ),
    Mutation(
        "measuring simpler plans against the programme's",
        "MergeCompFusion.search_for",
        "        best, *others = distinct([self.best_plan(model), *_simpler_plans(model)])\n",
        "        best, *others = [self.best_plan(model)]\n",
        (f"{TUNING}::test_with_a_codec_the_programmes_plan_stays_unless_a_simpler_one_is_faster",),
    ),
    Mutation(
        "measuring nothing while a schedule is at work",
        "Tuning._next_plan",
        "        if not self._part.uses_configured_compressor:\n            return None\n",
        "",
        (
            f"{TUNING}::test_no_step_is_measured_that_a_schedule_encodes_otherwise",
            f"{TUNING}::test_a_search_ends_when_a_schedule_begins",
        ),
    ),
    Mutation(
        "forgetting what was measured when a schedule began",
        "Tuning._run",
        "            if self._search is not None and self._part.uses_configured_compressor:\n",
        "            if self._search is not None:\n",
        (f"{TUNING}::test_a_search_ends_when_a_schedule_begins",),
    ),
    Mutation(
        "keeping votes compressed",
        "measure_codecs",
        "may_mix=not codec.votes and not codec.is_identity)\n",
        "may_mix=not codec.is_identity)\n",
        (f"{PROBE}::test_ranks_agree_and_training_is_not_touched",),
    ),
    Mutation(
        "renumbering uncompressed buckets with tensors that are not cut",
        "with_whole_tensors",
        "                uncompressed.append(len(buckets))\n",
        "                uncompressed.append(number)\n",
        ("tests/planning/test_whole.py::test_what_was_uncompressed_stays_so",),
    ),
]
