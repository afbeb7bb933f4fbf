"""The model that waits: its times, its gradients, and the same training under every strategy."""

import time

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from lightning_dear.collectives.streams import Streams
from lightning_dear.engine.read_order import ForwardRecorder
from lightning_dear.telemetry import device_work
from lightning_dear.workloads.replay import ReplayData, ReplayModel, load_profile
from lightning_dear.workloads.replay.waiter import Waiter
from tests.distributed.harness import distributed
from tests.lightning.fitting import STRATEGIES, assert_same, new_trainer, poison_until_waited
from tests.lightning.nets import copies
from tests.workloads.replaying import FakeTime, small_profile


def step(model, number=0):
    """Run forward and backward."""
    model.training_step(torch.tensor([number]), 0).backward()


def with_fake_time(model, late_s=0.0):
    """Let the model wait on a clock of its own."""
    fake = FakeTime(late_s)
    fake.drive(model.net.waiter)
    return fake


def test_parameters_are_the_profiles():
    model = ReplayModel("resnet50", scale=64)
    profile = load_profile("resnet50").scaled(64)
    assert [tuple(p.shape) for p in model.parameters()] == [
        shape for layer in profile.layers for shape in layer.shapes
    ]
    assert model.profile == profile
    names = [name for name, _ in model.named_parameters()][:3]
    assert names == ["net.layers.0.weight", "net.layers.1.weight", "net.layers.1.bias"]


def test_compute_replaces_the_profiles_times():
    assert ReplayModel("lstm", scale=64, compute_s=0.3).profile.forward_s == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["bert_base", "densenet201"])
def test_a_step_takes_the_profiles_time(name):
    model = ReplayModel(name, scale=1000)
    fake = with_fake_time(model, late_s=7e-5)
    for _ in range(3):
        step(model)
    expected_s = 3 * (model.profile.forward_s + model.profile.backward_s)
    assert fake.now_s == pytest.approx(expected_s, rel=0.01)


def test_gradients_are_ready_in_reverse_and_in_time():
    model = ReplayModel("densenet201", scale=1000)
    fake = with_fake_time(model, late_s=7e-5)
    ready = {}
    for number, layer in enumerate(model.net.layers):
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, number=number: ready.update({number: fake.now_s})
            )
    loss = model.training_step(torch.tensor([0]), 0)
    expected_s = fake.now_s
    loss.backward()
    assert list(ready) == list(range(len(model.profile.layers)))[::-1]
    for number, layer in reversed(list(enumerate(model.profile.layers))):
        expected_s += layer.backward_s
        assert ready[number] == pytest.approx(expected_s, abs=5e-4)


def test_on_a_real_clock_too():
    model = ReplayModel(small_profile(forward_s=0.005, backward_s=0.005))
    took = []
    for _ in range(8):
        late_s, start = model.late_s, time.perf_counter()
        step(model)
        # Without what a busy machine took.
        took.append(time.perf_counter() - start - (model.late_s - late_s))
    assert 0.97 * 0.04 < min(took) < 1.1 * 0.04


def test_parameters_are_read_in_order_where_the_engine_sees_it():
    model = ReplayModel(small_profile())
    with_fake_time(model)
    parameters = list(model.parameters())
    recorder = ForwardRecorder(model, parameters, Streams())
    with recorder.recording():
        model.training_step(torch.tensor([0]), 0)
    assert list(recorder.first_use) == list(range(len(parameters)))
    assert recorder.ungated == {}


# --- gradients --------------------------------------------------------------------------------


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def test_every_gradient_has_memory_of_its_own():
    model = ReplayModel(small_profile())
    with_fake_time(model)
    step(model)
    gradients = [p.grad for p in model.parameters()]
    assert len({storage(gradient) for gradient in gradients}) == len(gradients)
    assert all(gradient.is_contiguous() for gradient in gradients)


def test_gradients_are_handed_over_without_a_copy():
    model = ReplayModel(small_profile())
    with_fake_time(model)
    step(model)
    first = [storage(p.grad) for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    step(model)
    assert [storage(p.grad) for p in model.parameters()] == first


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_stay_zero_when_accumulated_and_clipped(set_to_none):
    model = ReplayModel(small_profile())
    with_fake_time(model)
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        step(model)
        step(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_accumulating_adds_nothing_to_what_stands_there():
    model = ReplayModel(small_profile())
    with_fake_time(model)
    step(model)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad.fill_(number + 1.0)
    step(model)
    for number, parameter in enumerate(model.parameters()):
        assert torch.equal(parameter.grad, torch.full_like(parameter, number + 1.0))


def test_seeded_gradients_depend_on_batch_and_parameter_alone():
    drawn = []
    for number in (3, 3, 4):
        model = ReplayModel(small_profile(), gradient_seed=1)
        with_fake_time(model)
        step(model, number)
        drawn.append([p.grad for p in model.parameters()])
    assert_same(drawn[0], drawn[1], "gradients")
    assert not any(torch.equal(a, b) for a, b in zip(drawn[0], drawn[2], strict=True))
    assert not torch.equal(drawn[0][1], drawn[0][2])
    assert drawn[0][0].std() == pytest.approx(1, rel=0.3)


def test_seeded_gradients_are_new_in_every_batch():
    """And copied: engines write into what they get."""
    model = ReplayModel(small_profile(), gradient_seed=1)
    with_fake_time(model)
    seen = []
    for number in (0, 1, 0, *range(2, 8)):
        model.zero_grad(set_to_none=True)
        step(model, number)
        seen.append([p.grad.clone() for p in model.parameters()])
        for parameter in model.parameters():
            parameter.grad.zero_()
    assert_same(seen[0], seen[2], "gradients")
    for of_parameter in zip(*seen[2:], strict=True):
        assert len({tuple(one.view(-1).tolist()) for one in of_parameter}) == len(of_parameter)


def test_encoding_takes_as_long_as_it_is_told():
    """From each step's beginning on: ranks train one model after another."""
    charges = []
    for encoding_scale in (8.0, 1.0):
        model = ReplayModel(small_profile(), encoding_scale=encoding_scale)
        with_fake_time(model)
        step(model)
        charges.append(device_work._charge)
    assert charges == [7.0, 0.0]


def test_seeded_gradients_accumulate():
    model = ReplayModel(small_profile(), gradient_seed=1)
    with_fake_time(model)
    step(model)
    before = [p.grad.clone() for p in model.parameters()]
    step(model)
    assert_same([p.grad for p in model.parameters()], [2 * g for g in before], "gradients")


# --- strategies -------------------------------------------------------------------------------


def trained(strategy, *callbacks, **options):
    """Weights after three steps with random gradients."""
    model = ReplayModel(small_profile(0.0005, 0.0005), gradient_seed=1)
    trainer = new_trainer(
        strategy, *callbacks, max_steps=3, use_distributed_sampler=True, **options
    )
    with poison_until_waited():
        trainer.fit(model, datamodule=ReplayData(num_steps=20))
    return model, copies(model)


@distributed(world_sizes=[2])
def test_ours_trains_as_ddp_does() -> None:
    seen = []
    for accumulate in (1, 2):
        weights = {
            name: trained(strategy(), accumulate_grad_batches=accumulate)[1]
            for name, strategy in STRATEGIES.items()
        }
        assert_same(weights["dear"], weights["ddp"], f"accumulating {accumulate}")
        seen.append(weights["ddp"])
    assert not torch.equal(seen[0][0], seen[1][0])
    assert seen[0][0].abs().min() > 0


class Watcher(Callback):
    """Notes what kind of parameter stands in the first layer before backward."""

    def __init__(self):
        self.seen = set()

    def on_before_backward(self, trainer, pl_module, loss):
        self.seen.add(type(pl_module.net.layers[0].weight).__name__)


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP2 on CPUs"
)
@distributed(world_sizes=[2])
def test_fsdp2_trains_as_ddp_does_and_gathers_once_a_step() -> None:
    _, expected = trained(STRATEGIES["ddp"]())
    watcher = Watcher()
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    model, _ = trained(strategy, watcher)
    assert watcher.seen == {"Parameter"}
    model.net.reshard()
    for left, right in zip(model.parameters(), expected, strict=True):
        assert type(left).__name__ == "DTensor"
        torch.testing.assert_close(left.full_tensor(), right)


def test_units_of_layers_are_closed_once_full():
    profile = small_profile(shapes=[((10, 10),)] * 5)

    def units(nbytes):
        return ReplayModel(profile, shard_unit_mb=nbytes / 2**20).units()

    assert [len(unit) for unit in units(401)] == [2, 2, 1]
    assert [len(unit) for unit in units(400)] == [1, 1, 1, 1, 1]
    assert [len(unit) for unit in units(0)] == [1, 1, 1, 1, 1]


def test_validation_and_test_wait_for_a_forward(tmp_path):
    model = ReplayModel(small_profile())
    fake = with_fake_time(model)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.test(model, datamodule=ReplayData(num_steps=3), verbose=False)
    trainer.validate(model, datamodule=ReplayData(num_steps=3), verbose=False)
    assert fake.now_s == pytest.approx(2 * model.profile.forward_s)


def test_another_device_is_refused():
    model = ReplayModel(small_profile())
    model.trainer = type("Trainer", (), {})()
    model.trainer.strategy = type("Strategy", (), {"root_device": torch.device("cuda")})()
    with pytest.raises(ValueError, match="accelerator='cpu'"):
        model.setup("fit")


def test_impossible_options_are_refused():
    with pytest.raises(ValueError, match="quick_batches=-1 is not valid. Give an integer >= 0"):
        ReplayModel(small_profile(), quick_batches=-1)
    with pytest.raises(ValueError, match="encoding_scale=0.5 is not valid. Choose 1 or more"):
        ReplayModel(small_profile(), encoding_scale=0.5)
    with pytest.raises(ValueError, match="shard_unit_mb"):
        ReplayModel(small_profile(), shard_unit_mb=-1)
    with pytest.raises(ValueError, match="num_steps"):
        ReplayData(num_steps=0)


def test_data_lasts_for_the_steps():
    data = ReplayData(num_steps=7, batch_size=3)
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert len(batches) == 7
    assert sorted(torch.cat(batches).tolist()) == list(range(21))
    assert len(data.val_dataloader()) == len(data.test_dataloader()) == 1


def test_the_real_clock_is_the_default():
    waiter = Waiter()
    start = time.perf_counter()
    waiter.begin()
    waiter.wait(0.01)
    assert time.perf_counter() - start >= 0.01 - 1e-4
