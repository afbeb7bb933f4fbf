"""How batches that have weights are counted."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

WEIGHTS = "tests/lightning/test_weights.py"
REFUSED = "tests/lightning/test_refused_weights.py"
FABRIC = "tests/fabric/test_weights.py"
ONE_PROCESS = f"{WEIGHTS}::test_end_weights_are_those_of_one_process"

BATCH_WEIGHTS = [
    Mutation(
        "losses are multiplied by the weight of their batch",
        "DearStrategy.backward",
        "args if factor == 1.0 else (args[0] * factor, *args[1:])",
        "args",
        (ONE_PROCESS,),
    ),
    Mutation(
        "losses are multiplied under Fabric",
        "DearFabricStrategy.backward",
        "tensor if factor == 1.0 else tensor * factor",
        "tensor",
        (f"{FABRIC}::test_end_weights_are_those_of_one_process",),
    ),
    Mutation(
        "gradients of weight 0 are dropped",
        "BatchWeights.dropping",
        "[] if self.counts else ",
        "[] if self else ",
        (ONE_PROCESS,),
    ),
    Mutation(
        "a rank whose weights are 0 launches nothing in backward",
        "OptimizerPipeline.backward",
        "Backward.LAST if self._training.weights.counts else Backward.DROPPED",
        "Backward.LAST",
        (ONE_PROCESS,),
    ),
    Mutation(
        "the exchange of weights is waited for if no rank has a gradient",
        "MeanGradient.finish_rounds",
        "            self.training.weights.finish()\n",
        "",
        (ONE_PROCESS,),
    ),
    Mutation(
        "weights are forgotten at the end of a step",
        "OptimizerPipeline._on_inner_step",
        "        self._training.weights.end_step()\n",
        "",
        (f"{FABRIC}::test_a_step_ends_its_weights",),
    ),
    Mutation(
        "weights are forgotten with the gradients",
        "OptimizerPipeline.drop_gradients",
        "        self._training.weights.reset()\n",
        "",
        (f"{WEIGHTS}::test_a_step_that_overflows_on_one_rank",),
    ),
    Mutation(
        "one rank multiplies its gradients by its own weights",
        "MeanGradient._bring",
        "            self.training.weights.scale_alone(self.plans.trained.parameters)\n",
        "            pass\n",
        (ONE_PROCESS,),
    ),
    Mutation(
        "one rank multiplies them once",
        "BatchWeights.scale_alone",
        "        self._is_scaled = self.is_on\n",
        "",
        (ONE_PROCESS,),
    ),
    Mutation(
        "ranks compare their numbers of batches",
        "SharedOptions._values",
        "_BATCHES: self._weights.num_batches",
        "_BATCHES: 0",
        (f"{REFUSED}::test_all_ranks_refuse_other_numbers_of_batches",),
    ),
    Mutation(
        "all ranks look at all weights",
        "BatchWeights._hear",
        "        self._check(dict(enumerate(sums)))\n",
        "",
        (f"{REFUSED}::test_all_ranks_refuse_a_bad_weight",),
    ),
    Mutation(
        "a batch that is not valid travels as it is",
        "BatchWeights.launch",
        "next((one for one in self._counted if not 0 <= one <= MOST), self.own)",
        "self.own",
        (f"{REFUSED}::test_all_ranks_refuse_a_bad_weight",),
    ),
    Mutation(
        "weights that come late are refused",
        "BatchWeights._count",
        "        if self._is_launched:\n",
        "        if False:\n",
        (f"{REFUSED}::test_what_is_refused",),
    ),
    Mutation(
        "several optimizers may not accumulate",
        "Pipeline.hold_back",
        "        self.training.weights.may_accumulate = False\n",
        "",
        (f"{REFUSED}::test_what_is_refused",),
    ),
    Mutation(
        "an optimizer keeps weights until it has stepped",
        "BatchWeights.reset",
        "        if self.holds_gradients():\n            return\n",
        "",
        (f"{REFUSED}::test_two_optimizers_share_the_weights_of_a_batch",),
    ),
    Mutation(
        "a batch's weight is no other batch's",
        "BatchWeights.end_step",
        "            self.forget()\n",
        "            pass\n",
        (f"{FABRIC}::test_a_weight_is_used_once",),
    ),
    Mutation(
        "in manual optimization a batch's weight ends with it",
        "weigh_batch",
        "        weights.forget()\n",
        "        pass\n",
        (f"{REFUSED}::test_a_weight_that_is_not_used_is_not_kept",),
    ),
    Mutation(
        "validation gives no weights",
        "PipelineStrategy.weigh",
        "            if not self._is_validating:\n",
        "            if True:\n",
        (f"{REFUSED}::test_hooks_weigh_and_validation_does_not",),
    ),
    Mutation(
        "plain backwards of other weights are refused",
        "OptimizerPipeline._keep_in_grad",
        "            self._training.weights.refuse_plain()\n",
        "            pass\n",
        (f"{REFUSED}::test_a_plain_backward_of_another_weight_is_refused",),
    ),
    Mutation(
        "gradients of no optimizer are weighed",
        "UnheldGradients.average",
        "flat.mul_(self._weights.scale) if self._weights.own else flat.zero_()",
        "flat.mul_(1 / self._collectives.world.size)",
        (f"{FABRIC}::test_gradients_that_no_optimizer_holds_are_weighed_too",),
    ),
    Mutation(
        "weights travel while backward runs",
        "Pipeline.backward",
        "        if synchronize:\n            weights.launch()\n",
        "",
        ("tests/engine/test_batch_weights.py::test_weights_travel_while_backward_runs",),
    ),
]
