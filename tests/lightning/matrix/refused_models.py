"""What is refused because of the optimizer or the model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.lightning.fitting import dear, fit
from tests.lightning.matrix.rows import Refused
from tests.lightning.nets import Net
from tests.optimizers.strangers import Global, Lookahead

row = partial(Refused, section="Optimizers and models")
WHOLE = "an element's update depends on others of the tensor"
ELEMENTWISE = '`gather="gradients"`'
ONE_BY_ONE = 'an element-wise one (SGD, AdamW, ...), or `strategy="ddp"`'


class Lars(Optimizer):
    """Scales a tensor's step by its norm: not element-wise, and known by name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1e-9)))
        return loss


class HomeMadeLars(Lars):
    """Under a name that no list knows."""


class ClosureFree(torch.optim.SGD):
    """Steps without calling its closure."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


class UntouchedNet(Net):
    """Fails the test if it is ever trained."""

    def __init__(self, new_optimizer: Callable[[nn.Module], Any], model: str = "mlp") -> None:
        super().__init__(model)
        self.new_optimizer = new_optimizer

    def training_step(self, *_: Any) -> Any:
        raise AssertionError("training began")

    def configure_optimizers(self) -> Any:
        return self.new_optimizer(self.net)


class _TrainedNet(UntouchedNet):
    training_step = Net.training_step


class _SparseNet(Net):
    """Its embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.table = nn.Embedding(5, 7, sparse=True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss([self.table(batch[1]), batch[1]])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sgd(module: nn.Module) -> Optimizer:
    """One that works."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _foreign(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(nn.Linear(5, 6).parameters(), lr=0.1)


def _frozen(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.requires_grad_(False).parameters(), lr=0.1)


def _none(module: nn.Module) -> None:
    return None


def _twice(module: nn.Module) -> Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        return torch.optim.SGD([*module.parameters(), *module.layers[0].parameters()], lr=0.1)


def _fit_in_one_memory() -> None:
    net = UntouchedNet(sgd)
    net.net.layers[2].bias = nn.Parameter(net.net.layers[2].weight.data[0, :61])
    fit(dear(), net)


def _fit_ignored() -> None:
    net = UntouchedNet(sgd)
    net._ddp_params_and_buffers_to_ignore = {"net.layers.2.weight"}
    fit(dear(), net)


def _fit_lazy() -> None:
    net = UntouchedNet(sgd)
    if os.environ["RANK"] == "1":
        net.net.layers.append(nn.LazyLinear(3))
    fit(dear(), net)


def _of(kind: Callable[[Any], Optimizer], module: nn.Module) -> Optimizer:
    return kind(module.parameters())


def _muon(module: nn.Module) -> Optimizer:
    return torch.optim.Muon([p for p in module.parameters() if p.dim() == 2])


def _wrapped(module: nn.Module) -> Optimizer:
    return Lookahead(sgd(module))


def _closure_free(module: nn.Module) -> Optimizer:
    return ClosureFree(module.parameters(), lr=0.1)


def _fit_net(new_net: Callable[[], Any]) -> None:
    fit(dear(), new_net())


def _fit(new_optimizer: Callable[[nn.Module], Any], **options: Any) -> None:
    fit(dear(**options), UntouchedNet(new_optimizer))


def _fit_complex() -> None:
    net = UntouchedNet(sgd)
    net.net.register_parameter("phases", nn.Parameter(torch.zeros(3, dtype=torch.cfloat)))
    fit(dear(compressor="int8"), net)


def _fit_different(kind: str) -> None:
    """One rank alone is wrong; all say so, and none is left waiting."""
    net = UntouchedNet(sgd)
    if os.environ["RANK"] == "1":
        if kind == "shape":
            net.net.layers[2] = nn.Linear(131, 62)
        elif kind == "number":
            net.net.layers.append(nn.Linear(3, 3))
        else:
            net.new_optimizer = _faster if kind == "learning rate" else _foreign
    fit(dear(), net)


def _faster(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2)


class _DriftingNet(_TrainedNet):
    """One rank alone steps with a smaller learning rate from its third batch on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if os.environ["RANK"] == "1" and batch_idx == 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


class _StrangerNet(_TrainedNet):
    """Steps another optimizer than the one it returned."""

    def optimizer_step(self, *args: Any) -> None:
        *_, closure = args
        closure()
        sgd(self.net).step()


class _HastyNet(_TrainedNet):
    """Exchanges its optimizer between two steps."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.trainer.optimizers = [sgd(self.net)]


def _not_elementwise(kind: Any, **options: Any) -> Refused:
    return row(
        name=f"{kind.__name__}{' with gather=' if options else ''}{options.get('gather', '')}",
        run=partial(_fit, partial(_of, kind), **options),
        message=f"strategy='dear' cannot shard {kind.__name__}",
        why=WHOLE,
        instead=ELEMENTWISE,
    )


OPTIMIZERS = (
    replace(_not_elementwise(torch.optim.LBFGS), instead=ONE_BY_ONE),
    _not_elementwise(torch.optim.Adafactor, gather="parameters"),
    replace(_not_elementwise(torch.optim.SparseAdam), instead=ONE_BY_ONE),
    _not_elementwise(Lars, gather="parameters"),
    row(
        name="any other optimizer that is not element-wise, with gather=parameters",
        run=partial(_fit, partial(_of, HomeMadeLars), gather="parameters"),
        message="strategy='dear' cannot shard HomeMadeLars: a tensor of shape",
        why="found by a trial before training",
        instead=ELEMENTWISE,
    ),
    row(
        name="Muon with gather=parameters",
        run=partial(_fit, _muon, gather="parameters"),
        message="strategy='dear' cannot shard Muon",
        why=WHOLE,
        instead=ELEMENTWISE,
        needs=hasattr(torch.optim, "Muon"),
    ),
    row(
        name="an optimizer that wraps another",
        run=partial(_fit, _wrapped),
        message="strategy='dear' does not support Lookahead, which wraps another optimizer",
        why="the inner one's state would be out of sight",
        instead='the inner one alone, or `strategy="ddp"`',
    ),
    row(
        name="an optimizer that couples tensors",
        run=partial(_fit, partial(_of, partial(Global, lr=0.1))),
        message="And gather='gradients' is no way out",
        why="found by a trial before training",
        instead=ONE_BY_ONE,
    ),
    row(
        name="an optimizer that does not call its closure",
        run=partial(_fit_net, partial(_TrainedNet, _closure_free)),
        message="ClosureFree.step() did not call its closure",
        why="Lightning runs forward and backward in it",
        instead="call the closure before the update",
        error="RuntimeError",
    ),
    row(
        name="no optimizer",
        run=partial(_fit, _none),
        message="strategy='dear' needs an optimizer",
        why="there is nothing to train",
        instead="return one from `configure_optimizers`",
    ),
    row(
        name="an optimizer over frozen parameters alone",
        run=partial(_fit, _frozen),
        message="The optimizer holds no parameter of the module that requires a gradient",
        why="there is nothing to train",
        instead="unfreeze some before the fit",
    ),
    row(
        name="parameters that are not the module's",
        run=partial(_fit, _foreign),
        message="SGD's parameter group 0 holds 2 parameter(s) that are not the module's",
        why="no rank would send them",
        instead="make them attributes of the LightningModule",
    ),
    row(
        name="a parameter twice in an optimizer's groups",
        run=partial(_fit, _twice),
        message="'net.layers.0.weight' stands twice in the parameter groups of SGD",
        why="torch steps it twice",
        instead="name each once",
    ),
    row(
        name="two parameters over the same memory",
        run=_fit_in_one_memory,
        message="'net.layers.2.weight' and 'net.layers.2.bias' are two tensors in the same memory",
        why="each would be moved to a place of its own",
        instead="assign the Parameter itself",
    ),
    row(
        name="training what `_ddp_params_and_buffers_to_ignore` names",
        run=_fit_ignored,
        message="'net.layers.2.weight' stands in _ddp_params_and_buffers_to_ignore, and SGD trains",
        why="weights are equal on all ranks; buffers and frozen parameters may be named",
        instead="freeze it, or take its name out",
    ),
    row(
        name="lazy layers before their first forward",
        run=_fit_lazy,
        message="'net.layers.6.weight' has no shape yet",
        why="parameters are laid out before the first batch",
        instead="run a dummy forward pass in `__init__`",
    ),
    row(
        name="complex parameters with a compressor",
        run=_fit_complex,
        message=(
            "'net.phases' has dtype torch.complex64, and compressor='int8' encodes only"
            " real numbers"
        ),
        why="a codec reads real numbers",
        instead='two real parameters, or `compressor="none"`',
    ),
    row(
        name="sparse gradients",
        run=partial(_fit_net, _SparseNet),
        message="has a sparse gradient, which strategy='dear' does not",
        why="a bucket is dense",
        instead="`sparse=False` in the embedding",
        error="RuntimeError",
    ),
    row(
        name="ranks with other shapes",
        run=partial(_fit_different, "shape"),
        message="Ranks hold different models: rank 0 has",
        why="their buckets would not fit",
        instead="build the same model on every rank",
    ),
    row(
        name="ranks with another number of parameters",
        run=partial(_fit_different, "number"),
        message="Ranks hold different models: rank 0 has no more tensors, rank 1 has",
        why="their buckets would not fit",
        instead="build the same model on every rank",
    ),
    row(
        name="ranks with another learning rate",
        run=partial(_fit_different, "learning rate"),
        message="Ranks set up different optimizers: SGD 0, parameter group 0: lr is 0.1 on rank 0",
        why="each rank steps a part of the model",
        instead="set the same on all ranks",
    ),
    row(
        name="ranks that step with another learning rate, or another option",
        run=partial(_fit_net, partial(_DriftingNet, sgd)),
        message="Ranks step with different options: SGD 0, parameter group 0: lr is 0.1 on rank 0",
        why="each rank steps a part of the model; found in the step",
        instead="one metric for schedules: `self.log(..., sync_dist=True)`",
    ),
    row(
        name="a step of another optimizer for parameters that one of the training holds",
        run=partial(_fit_net, partial(_StrangerNet, sgd)),
        message="A SGD that the training does not know steps parameters of the",
        why="its `.grad` is not the mean over ranks",
        instead="return it from `configure_optimizers`",
        error="RuntimeError",
    ),
    row(
        name="trainer.optimizers assigned in mid-training",
        run=partial(_fit_net, _HastyNet),
        message="trainer.optimizers was assigned in the midst of a fit, and strategy='dear' trains",
        why="buckets and state belong to the first ones",
        instead="return all from `configure_optimizers`, or begin another fit",
        error="RuntimeError",
    ),
    row(
        name="ranks with another optimizer",
        run=partial(_fit_different, "optimizer"),
        message="parameter(s) that are not the module's",
        why="each rank steps a part of the model",
        instead="set the same on all ranks",
    ),
)
