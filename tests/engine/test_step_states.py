"""The table at the head of `step_state.py`: every row, in every order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch import nn

from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.world import World
from lightning_dear.compression import Int8
from lightning_dear.engine import step_state
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step_state import StepState
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion

ARE_THERE = (StepState.REDUCED, StepState.CHANGED, StepState.EXPOSED)
RANK, WORLD_SIZE = 0, 1


class Steps(RuleBasedStateMachine):
    """Drives one rank through events, and keeps the state that the table asks for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        # So small that no sum of twenty backwards makes the loss inf, which a step would refuse.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        # With a codec there are buckets on one rank too.
        self.options = ExchangeOptions("parameters", True, Int8())
        self.pipeline = Pipeline(
            self.model,
            [self.optimizer],
            PairwiseCollectives(None, None, None, World(RANK, WORLD_SIZE)),
            NoFusion(),
            options=self.options,
        )
        self.part = self.pipeline.parts[0]
        self.expected = StepState.EMPTY
        self.num_steps = 0
        # The first step is recorded.
        self.backward_last()
        self.step()

    def _loss(self) -> torch.Tensor:
        with self.pipeline.forward():
            return self.model(torch.ones(4, 3)).square().sum()

    def _check(self, expected: StepState) -> None:
        self.expected = expected
        assert self.part.progress.state is expected

    def _refuses_more(self) -> bool:
        """Means that were changed or shown would be encoded twice."""
        is_changed = self.expected in (StepState.CHANGED, StepState.EXPOSED)
        return Int8().encodes_once and is_changed

    def _backward(self, *, synchronize: bool) -> None:
        loss = self._loss()
        with self.pipeline.backward(synchronize=synchronize):
            loss.backward()

    @precondition(lambda self: self.expected is not StepState.ENDED)
    @rule()
    def backward_last(self) -> None:
        if self._refuses_more():
            with pytest.raises(RuntimeError, match="allows no backward after"):
                self._backward(synchronize=True)
            self._check(self.expected)
            return
        self._backward(synchronize=True)
        # The recorded one is reduced at once, and makes the plan.
        self._check(StepState.SENDING if self.num_steps else StepState.REDUCED)

    @precondition(lambda self: self.expected is not StepState.ENDED)
    @rule()
    def backward_local(self) -> None:
        if self._refuses_more():
            return
        self._backward(synchronize=False)
        is_sent = self.expected is StepState.SENDING
        self._check(StepState.SENDING if is_sent else StepState.ACCUMULATING)

    @precondition(lambda self: self.expected is not StepState.ENDED)
    @rule()
    def gradient_outside(self) -> None:
        if self.expected in ARE_THERE:
            with pytest.raises(RuntimeError, match="from no backward of the strategy's"):
                self._loss().backward()
            self._check(self.expected)
            # What it has left in `.grad` is in nobody's way.
            self.zero_grad()
            return
        self._loss().backward()
        self._check(self.expected)

    @precondition(lambda self: self.expected is not StepState.ENDED)
    @rule()
    def reduce(self) -> None:
        was_changed = self.expected in (StepState.CHANGED, StepState.EXPOSED)
        self.part.mean.reduce()
        self._check(StepState.CHANGED if was_changed else StepState.REDUCED)

    @precondition(lambda self: self.expected is not StepState.ENDED)
    @rule()
    def clip(self) -> None:
        was_exposed = self.expected is StepState.EXPOSED
        self.part.mean.clip_by_value(0.5)
        self._check(StepState.EXPOSED if was_exposed else StepState.CHANGED)

    @precondition(lambda self: self.expected is not StepState.ENDED)
    @rule()
    def expose(self) -> None:
        was_exposed = self.expected is StepState.EXPOSED
        self.part.mean.expose()
        self._check(self.expected if was_exposed else StepState.EXPOSED)

    @precondition(lambda self: self.expected is not StepState.ENDED)
    @rule()
    def step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1
        self._check(StepState.EMPTY)
        assert self.part.num_steps == self.num_steps

    @precondition(lambda self: self.expected is not StepState.ENDED)
    @rule()
    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self._check(StepState.EMPTY)

    @precondition(lambda self: self.expected is not StepState.ENDED)
    @rule()
    def replan(self) -> None:
        plan = self.part.plan
        assert plan is not None
        if self.expected in (StepState.EMPTY,):
            self.part.replan(plan)
        else:
            with pytest.raises(RuntimeError, match="Call it between"):
                self.part.replan(plan)
        self._check(self.expected)

    @precondition(lambda self: self.num_steps > 3)
    @rule()
    def detach(self) -> None:
        if self.expected is StepState.ENDED:
            return
        for _ in range(2):
            self.pipeline.detach()
            self._check(StepState.ENDED)

    @precondition(lambda self: self.expected is StepState.ENDED)
    @rule()
    def anything_after_the_end(self) -> None:
        mean = self.part.mean
        for event in (mean.reduce, self.part.drop_gradients, mean.expose):
            with pytest.raises(RuntimeError, match="training is over"):
                event()
        with (
            pytest.raises(RuntimeError, match="training is over"),
            self.part.backward(synchronize=True),
        ):
            pass

    def teardown(self) -> None:
        if self.expected is not StepState.ENDED:
            self.pipeline.detach()


TestSteps = pytest.mark.filterwarnings("ignore:SGD.zero_grad")(Steps.TestCase)
TestSteps.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_the_documents_show_the_states() -> None:
    """The table in the source, and the picture in the documentation, name the states there are."""
    names = {state.name for state in StepState}
    table = step_state.__doc__ or ""
    assert set(re.findall(r"\b[A-Z]{5,}\b", table)) == names
    page = Path(__file__).resolve().parents[2] / "docs" / "how_it_works.md"
    section = page.read_text().split("## Where a step is")[1].split("\n## ")[0]
    assert set(re.findall(r"\b[A-Z]{5,}\b", section)) == names
