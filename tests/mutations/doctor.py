"""The doctor beside a training: it changes nothing, and ranks agree."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

DOCTOR = "tests/doctor/test_network_doctor.py"
SAME = f"{DOCTOR}::test_training_is_the_same_and_rank_0_tells_what_it_saw"

DOCTORS = [
    Mutation(
        "the groups of a fit are there again after the doctor's",
        "temporary_collectives",
        "        reusable_groups.update(kept)\n",
        "",
        (f"{SAME}[2-dear]",),
    ),
    Mutation(
        "ranks agree that all have measured",
        "_agreed",
        "if problems := [one for _, one in told if one is not None]:\n",
        "if problems := [one for one in [problem] if one is not None]:\n",
        (f"{DOCTOR}::test_one_rank_that_fails_stops_the_doctor_on_all_and_no_training",),
    ),
    Mutation(
        "the callback that lets the engine time steps is taken out again",
        "DearWatch.close",
        "        self._trainer.callbacks = others\n",
        "        pass\n",
        (f"{DOCTOR}::test_the_guard_waits_only_in_the_few_steps_that_are_timed",),
    ),
    Mutation(
        "the end of a backward is marked behind DDP's own wait",
        "StepWatch._gradient",
        "self._queue(lambda: self._queue(partial(self._mark, _ENDED)))",
        "self._queue(partial(self._mark, _ENDED))",
        ("tests/doctor/test_step_watch.py",),
    ),
    Mutation(
        "what the rank that waits least waits for is communication, and no more",
        "Findings.numbers",
        '            "messages_s": min(waits_s),\n',
        '            "messages_s": max(waits_s),\n',
        ("tests/doctor/test_prescription.py::test_waiting_for_a_late_rank_is_no_communication",),
    ),
    Mutation(
        "all batches of a step count",
        "StepTimes.computing_s",
        "self.num_batches * (times.forward_s + times.backward_s)",
        "(times.forward_s + times.backward_s)",
        ("tests/doctor/test_step_watch.py",),
    ),
    Mutation(
        "a rank without a doctor is found before anything is sent",
        "NetworkDoctor.on_before_zero_grad",
        "not _store().check(self._keys)",
        "not self._keys",
        (f"{DOCTOR}::test_a_rank_without_a_doctor_stops_it_before_anything_is_sent",),
    ),
    Mutation(
        "the last end of a backward counts",
        "StepWatch._step",
        "if what == _ENDED != after)",
        "if what == _ENDED)",
        ("tests/doctor/test_step_watch.py",),
    ),
    Mutation(
        "compiled code holds no mark",
        "StepWatch._use",
        "module.training and not torch.compiler.is_compiling()",
        "module.training",
        ("tests/doctor/test_step_watch.py::test_compiled_modules_are_timed_without_a_new_graph",),
    ),
    Mutation(
        "hooks are gone where a fit ends early",
        "NetworkDoctor._end",
        "                watch.close()\n",
        "                pass\n",
        (f"{DOCTOR}::test_nothing_is_left_where_a_fit_ends_early",),
    ),
]
