"""Recording the profile of a small model."""

import time

import pytest
import torch
from torch import nn

from lightning_dear.workloads.replay import LayerProfile, ModelProfile, ReplayModel
from lightning_dear.workloads.replay.recording import (
    owned_parameters,
    record_profile,
    run_order,
)


def mlp():
    return nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 4))


def test_a_recorded_mlp_has_its_sizes_and_takes_time():
    module = mlp()
    profile = record_profile(module, torch.randn(5, 8), num_steps=3, num_warm_up=1)
    assert [layer.shapes for layer in profile.layers] == [((300, 8), (300,)), ((4, 300), (4,))]
    assert [layer.name for layer in profile.layers] == ["0", "2"]
    assert (profile.name, profile.source) == ("Sequential", "measured")
    assert "3 steps" in profile.note
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in profile.layers)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(m._forward_pre_hooks for m in module.modules())


def test_a_recording_of_a_replay_is_the_profile_again():
    layers = (
        LayerProfile("fast", ((100,), (3,)), 0.002, 0.004),
        LayerProfile("slow", ((50,),), 0.020, 0.040),
        LayerProfile("middle", ((70,),), 0.006, 0.012),
    )
    profile = ModelProfile("three", "flops", "", layers)
    recorded = record_profile(ReplayModel(profile), torch.tensor([0]), num_steps=5, num_warm_up=1)
    assert [layer.shapes for layer in recorded.layers] == [layer.shapes for layer in layers]
    for layer, expected in zip(recorded.layers, layers, strict=True):
        # A core that others use adds some milliseconds.
        assert 0.8 < layer.forward_s / expected.forward_s < 1.5 + 0.01 / expected.forward_s
        assert 0.8 < layer.backward_s / expected.backward_s < 1.5 + 0.01 / expected.backward_s


def test_time_between_layers_counts_for_the_layer_before():
    class Sleeper(nn.Module):
        def forward(self, inputs):
            time.sleep(0.02)
            return inputs

    module = nn.Sequential(nn.Linear(2, 2), Sleeper(), nn.Linear(2, 2))
    first, second = record_profile(module, torch.ones(1, 2), num_steps=2, num_warm_up=0).layers
    assert first.forward_s > 0.02 > second.forward_s


def test_a_loss_of_ones_own_is_run():
    module = mlp()
    inputs = torch.randn(5, 8)
    calls = []

    def loss():
        calls.append(module.training)
        return module(inputs).square().mean()

    module.eval()
    record_profile(module, None, loss=loss, num_steps=2, num_warm_up=1)
    assert calls == [True] * 4
    assert not module.training


def test_parameters_of_modules_that_are_never_called_belong_to_the_one_around():
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0)
    profile = record_profile(layer, torch.randn(3, 1, 8), num_steps=1, num_warm_up=0)
    shapes = {layer.name: layer.shapes for layer in profile.layers}
    assert shapes["self_attn"] == ((24, 8), (24,), (8, 8), (8,))
    assert profile.num_parameters == sum(p.numel() for p in layer.parameters())


def test_shared_parameters_belong_to_the_first_module_that_runs():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 10, bias=False)
            self.embedding = nn.Embedding(10, 4)
            self.head.weight = self.embedding.weight
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, words):
            return self.head(self.embedding(words)) * self.gain

    tied = Tied()
    words = torch.tensor([1, 2])
    owned = owned_parameters(tied, run_order(tied, lambda: tied(words)))
    assert {name: len(parameters) for name, parameters in owned.items()} == {
        "": 1,
        "embedding": 1,
    }
    names = [layer.name for layer in record_profile(tied, words, num_steps=1).layers]
    assert names == ["Tied", "embedding"]


def test_a_parent_is_no_owner_of_what_its_child_owns_too():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.transform = nn.Linear(2, 2)
            self.decoder = nn.Linear(2, 3)
            self.bias = self.decoder.bias

        def forward(self, inputs):
            return self.decoder(self.transform(inputs))

    head = Head()
    owned = owned_parameters(head, run_order(head, lambda: head(torch.ones(1, 2))))
    assert list(owned) == ["transform", "decoder"]


def test_frozen_parameters_are_left_out():
    module = mlp()
    module[0].requires_grad_(False)
    profile = record_profile(module, torch.randn(5, 8), num_steps=1, num_warm_up=0)
    assert [layer.name for layer in profile.layers] == ["2"]


def test_parameters_that_are_not_used_are_refused():
    module = mlp()
    module.add_module("idle", nn.Linear(2, 2))
    module.forward = lambda inputs: module[2](module[1](module[0](inputs)))
    with pytest.raises(ValueError, match=r"no gradient|no module"):
        record_profile(module, torch.randn(5, 8), num_steps=1)


@pytest.mark.parametrize(("num_steps", "num_warm_up"), [(0, 1), (1, -1)])
def test_impossible_counts_are_refused(num_steps, num_warm_up):
    with pytest.raises(ValueError, match="num_steps=.* must be >= 1"):
        record_profile(mlp(), None, num_steps=num_steps, num_warm_up=num_warm_up)
