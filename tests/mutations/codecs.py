"""What codecs and what they remember must not do without."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ENGINE = "tests/exchange/test_coded.py"
FAILURES = "tests/exchange/test_coded_failures.py"
DGC = "tests/exchange/test_dgc_law.py"
MEMORY = "tests/compression/test_error_feedback.py"
PROPERTIES = "tests/compression/test_properties.py"
SELECTORS = "tests/compression/test_selectors.py"

LAW = f"{ENGINE}::test_what_is_lost_arrives_later"

CODECS = [
    Mutation(
        "adding what was not sent to the next gradient",
        "Residual.compensate",
        "            rows.add_(residual, alpha=decay)\n",
        "            pass\n",
        (LAW,),
    ),
    Mutation(
        "a smaller loss scale where numbers are clipped",
        "Fp16",
        "    largest: ClassVar[float] = torch.finfo(torch.float16).max\n",
        "",
        (f"{FAILURES}::test_a_loss_scale_hears_of_what_a_codec_would_clip",),
    ),
    Mutation(
        "sending nan past a threshold",
        "all_above",
        "        np.logical_not(np.less_equal(size, floor, out=own), out=own)\n",
        "        np.greater(size, floor, out=own)\n",
        (f"{SELECTORS}::test_of_rows_that_are_nan_nan_is_selected",),
    ),
    Mutation(
        "a threshold where all numbers are nan",
        "first_above",
        "    floor = floor.nan_to_num(nan=0.0)\n",
        "",
        (f"{SELECTORS}::test_of_rows_that_are_nan_nan_is_selected",),
    ),
    Mutation(
        "one pass through momentum in several rounds",
        "RunningMean.compensate",
        "        decay = 1.0 if self._has_pending else self.decay\n",
        "        decay = self.decay\n",
        (f"{MEMORY}::test_two_rounds_of_a_step_count_once",),
    ),
    Mutation(
        "fading what waits once a step, not once a round",
        "Residual.compensate",
        "        decay = 1.0 if self._has_pending else self.decay\n",
        "        decay = self.decay\n",
        (f"{MEMORY}::test_what_waits_fades_once_a_step",),
    ),
    Mutation(
        "fading what waits for its turn",
        "RandomK.owner_memory",
        "        return Residual(numel, device, decay=self.decay)\n",
        "        return Residual(numel, device)\n",
        (f"{MEMORY}::test_what_waits_fades_once_a_step",),
    ),
    Mutation(
        "saying that numbers wait",
        "PipelineStrategy._new_pipeline",
        "        refusals.say_what_waits(self._options, optimizers, collectives.world.size)\n",
        "",
        ("tests/fabric/test_waiting.py::test_a_trainer_says_it_once",),
    ),
    Mutation(
        "taking the loss scale out of what is kept",
        "Residual._keep",
        "            lost.div_(scale)\n",
        "            pass\n",
        (f"{ENGINE}::test_a_loss_scale_that_changes_changes_nothing",),
    ),
    Mutation(
        "masking momentum where velocity was sent",
        "Velocity.note_sent",
        "        for name in self.names:\n            self._next(name, rows).masked_fill_(sent",
        "        for name in self.names[1:]:\n            self._next(name, rows).masked_fill_(sent",
        (f"{DGC}::test_dgc_sends_all_of_its_velocity",),
    ),
    Mutation(
        "velocity, not gradients, in what is sent",
        "Velocity.compensate",
        '            torch.add(self._latest("residual", rows), momentum, out=waiting)\n',
        '            waiting.copy_(self._latest("residual", rows))\n',
        (f"{DGC}::test_dgc_sends_all_of_its_velocity",),
    ),
    Mutation(
        "clipping what a half cannot hold",
        "_HalfFloat.encode",
        "                place.copy_(tile.clamp(-largest, largest))\n",
        "                pass\n",
        ("tests/compression/test_floats.py",),
    ),
    Mutation(
        "a sum that may be neither finite nor infinite",
        "_HalfFloat.encode",
        "            if not math.isfinite(place.sum().item()):\n",
        "            if math.isinf(place.sum().item()):\n",
        ("tests/compression/test_floats.py",),
    ),
    Mutation(
        "clearing what lies behind a row of bytes",
        "_HalfFloat.encode",
        "        wire[:, 2 * numel :].zero_()\n",
        "",
        (PROPERTIES, "-kfp16"),
    ),
    Mutation(
        "a scale whose largest multiple is finite",
        "_BlockIntegers.encode",
        "clamp_(_FP32.tiny, largest)",
        "clamp_(_FP32.tiny)",
        (PROPERTIES, "-kint8 or int4"),
    ),
]
