"""What only a device needs: edges between streams, memory that is held, a host that goes on."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

STREAMS = "tests/streams/test_streams.py"
ACCELERATOR = "tests/streams/test_accelerator.py"
NATIVE = "tests/collectives/test_native.py"
COLLECTIVES = "tests/collectives/test_collectives.py"
SIGTERM = "tests/lightning/test_sigterm.py"
CLOCK = "tests/telemetry/test_clock.py"
INFERENCE = (
    "tests/checkpoint/test_restoring.py"
    "::test_what_is_saved_loaded_and_planned_under_inference_mode_is_trained_on",
)


DEVICES = [
    Mutation(
        "the wait of the stream that steps, whoever reads first",
        "ParameterGatherer._wait",
        "        self._streams.lead_readers()\n",
        "",
        (f"{STREAMS}::test_weights_that_are_averaged_on_another_stream",),
    ),
    Mutation(
        "streams that the first forward has read on among those that wait",
        "ForwardRecorder._record_read",
        "        self._streams.readers.add(self._streams.current())\n",
        "",
        (f"{STREAMS}::test_a_layer_that_two_streams_read_is_waited_for_by_both",),
    ),
    Mutation(
        "the wait of a launch for all streams that have written gradients",
        "BucketRound._launch",
        "        self._collectives.streams.follow(self.written_on)\n",
        "",
        (f"{STREAMS}::test_branches_on_two_streams_that_share_a_bucket",),
    ),
    Mutation(
        "the wait for them of who copies what was held",
        "GradientCollector._copy_held",
        "        self._collectives.streams.follow(self._round.written_on)\n",
        "",
        (f"{STREAMS}::test_branches_on_two_streams_that_share_a_bucket",),
    ),
    Mutation(
        "keeping gradients that are copied on another stream",
        "GradientCollector._copy_held",
        "        self._kept += gradients if len(streams) > 1 else []\n",
        "",
        (f"{STREAMS}::test_branches_on_two_streams_that_share_a_bucket",),
    ),
    Mutation(
        "holding what a collective was given",
        "Collectives.start",
        "        return [(None, work, arguments)]\n",
        "        return [(None, work)]\n",
        (NATIVE, f"{STREAMS}::test_what_is_sent_once_lives_until_it_has_been_sent"),
    ),
    Mutation(
        "letting go of it after the wait",
        "Work.wait",
        "        self._arrive, self._finishes = _nothing, []\n",
        "",
        (NATIVE,),
    ),
    *(
        Mutation(
            f"ordinary tensors under inference mode ({name})",
            symbol,
            "    @torch.inference_mode(False)\n",
            "",
            INFERENCE,
        )
        for name, symbol in (
            ("what was loaded", "OptimizerPipeline.prepare_state"),
            ("what is saved", "OptimizerPipeline.optimizer_state_dict"),
            ("another plan", "OptimizerPipeline.replan"),
        )
    ),
    Mutation(
        "flags of a rank alone on the host",
        "Collectives.flags_device",
        'torch.device("cpu")',
        "self.streams.device",
        (ACCELERATOR,),
    ),
    Mutation(
        "refusing late gradients that no hook has seen",
        "GradientCollector.collect_rest",
        "                    self._check_may_be_late(index)\n",
        "",
        ("tests/streams/test_late_gradients.py",),
    ),
    Mutation(
        "sums in fp32 where they are asked for",
        "NativeCollectives.launch_reduce_scatter",
        "self.sums_in_fp32 and",
        "False and",
        ("tests/streams/test_sums.py",),
    ),
    Mutation(
        "complex numbers as pairs of real ones",
        "NativeCollectives.start",
        "*map(_as_real, arguments)",
        "*arguments",
        ("tests/streams/test_trainings.py::test_odd_models[spectral-2]",),
    ),
    Mutation(
        "the same timeout on both backends",
        "DearStrategy.__init__",
        "timeout=timeout or NO_TIMEOUT,",
        "timeout=timeout,",
        ("tests/strategy/test_options.py::test_no_timeout_is_half_an_hour_on_every_backend",),
    ),
    Mutation(
        "a digest that the device is given without a wait",
        "Notes.write",
        "torch.full((1,), word, device=room.device)",
        "torch.tensor([word], device=room.device)",
        (ACCELERATOR,),
    ),
    Mutation(
        "draws that the device is given without a wait",
        "compression.sparse:_draw",
        ", non_blocking=True",
        "",
        (ACCELERATOR,),
    ),
    Mutation(
        "a look at what is not finite that waits for no device",
        "CompressedExchange._hears_on_host",
        " and collectives.streams.current() is None\n",
        "\n",
        (f"{STREAMS}::test_the_host_of_one_rank_waits_for_nothing",),
    ),
    Mutation(
        "numbers that are read one step later",
        "Notes.hear",
        "else earlier()\n",
        "else self._earlier()\n",
        (f"{SIGTERM}::test_with_nccl_all_hear_it_one_step_later_and_no_host_waits_for_the_number",),
    ),
    Mutation(
        "times from the mark that was asked for last",
        "StreamClock.seconds",
        "        self._origin_s += self._origin.elapsed_time(mark) / 1e3\n"
        "        self._origin = mark\n"
        "        return self._origin_s\n",
        "        return self._origin_s + self._origin.elapsed_time(mark) / 1e3\n",
        (CLOCK,),
    ),
    Mutation(
        "no marks of waits that nobody asks for",
        "Instruments.waiting",
        "any(one is not None for one in (self._current, self.timeline, self.marks))",
        "True",
        (CLOCK,),
    ),
    Mutation(
        "aborting where a failure is not noticed",
        "FailureWatch._run",
        "                    abort.start()\n",
        "                    pass\n",
        ("tests/strategy/test_failures.py::test_who_does_not_notice_a_failure_aborts_soon",),
    ),
    Mutation(
        "refusing what has arrived since an abort",
        "Collectives.check",
        "        if self.was_aborted:\n",
        "        if False:\n",
        (NATIVE,),
    ),
    Mutation(
        "exact products",
        "LowRankBucket",
        "    @exact_products()\n    def encode_first",
        "    def encode_first",
        ("tests/exchange/test_low_rank.py::test_products_are_exact_whatever_users_set_for_theirs",),
    ),
    Mutation(
        "draws of the CPU",
        "compression.sparse:_draw",
        "    drawing = Generator()",
        "    drawing = Generator(generator.device)",
        ("tests/compression/test_sparse.py::test_randomk_draws_alike_on_all_devices",),
    ),
    Mutation(
        "waiting until connections are open",
        "collectives.factory:_connect",
        "    collectives.streams.synchronize()\n",
        "",
        (COLLECTIVES,),
    ),
    Mutation(
        "nan in what is sent, whatever an optimizer makes of nan",
        "CodedBucket.encode_gather",
        "                largest.masked_fill_(is_nan, math.nan)\n",
        "                pass\n",
        (
            f"{STREAMS}"
            "::test_nan_of_one_rank_shows_in_all_weights_of_an_optimizer_that_steps_by_signs",
        ),
    ),
    Mutation(
        "memory of gradients that is not used again before they are read",
        "BucketRound.finish",
        "        self._collectives.streams.lead_readers()\n",
        "",
        (f"{STREAMS}::test_branches_on_two_streams_that_share_a_bucket",),
    ),
]
