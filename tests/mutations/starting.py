"""What is removed of the checks of how ranks were started."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/strategy/test_starting.py"

STARTING = [
    Mutation(
        "refusing other numbers of ranks than a launcher has started",
        "check_start",
        "        _check_counts(environment, len(devices), num_nodes)\n",
        "",
        (f"{TESTS}::test_torchrun_with_another_number_of_ranks_is_refused_by_every_rank",),
    ),
    Mutation(
        "refusing surplus ranks of a host on all of its ranks",
        "_check_counts",
        'int(os.environ.get("LOCAL_WORLD_SIZE", here))',
        "here",
        (f"{TESTS}::test_torchrun_with_another_number_of_ranks_is_refused_by_every_rank",),
    ),
    Mutation(
        "refusing nodes that no other can find",
        "check_start",
        "not set(NODE_VARIABLES).isdisjoint(os.environ)",
        "True",
        (f"{TESTS}::test_a_node_that_no_other_can_find_is_refused",),
    ),
    Mutation(
        "saying which node does not come",
        "late_nodes_named",
        "    timer.start()\n",
        "",
        (f"{TESTS}::test_after_a_while_the_strategy_says_which_node_does_not_come",),
    ),
    Mutation(
        "saying nothing after all nodes have come",
        "late_nodes_named",
        "        timer.cancel()\n",
        "        pass\n",
        (f"{TESTS}::test_nobody_is_named_after_the_meeting",),
    ),
    Mutation(
        "equal digests of True and 1",
        "SharedOptions.value",
        '.replace("False", "0")',
        "",
        ("tests/engine/test_shared_options.py::test_what_is_equal_has_equal_digests",),
    ),
]
