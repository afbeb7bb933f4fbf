"""The model of the time behind the profiles, and that the files are what it makes."""

import pytest
import torch
from torch import nn

from lightning_dear.workloads.replay import load_profile
from tests.benchmarks.make_profiles import DEFINITIONS, Definition, profile_of


def tiny():
    """A large product, a cheap activation and a small product."""
    return nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Flatten(0, 1), nn.Linear(8192, 2))


def run(model):
    model(torch.empty(64, 32, 4096))


def test_an_operation_takes_the_longer_of_its_flops_and_its_bytes():
    profile = profile_of("tiny", Definition(tiny, run, "Tiny.", "this file"))
    first, second = profile.layers
    rows = 64 * 32
    product_s = 2 * rows * 4096 * 8192 / 7e12
    # From torch 2.15 on a product ends with aten._unsafe_view, which counts as a copy.
    has_copy = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    activation_s = (1 + has_copy) * 2 * 4 * rows * 8192 / 5e11
    assert first.forward_s == pytest.approx(product_s + activation_s, rel=1e-3)
    nbytes = 4 * (rows * 8192 + 2 * 8192 + 2 + 2 * rows)
    assert second.forward_s == pytest.approx(nbytes / 5e11, rel=1e-3)
    assert first.backward_s == 2 * first.forward_s
    assert first.shapes == ((8192, 4096), (8192,))
    assert profile.source == "flops"
    assert profile.note.startswith("Tiny. ")
    assert "this file" in profile.note


def test_the_lstm_needs_no_extra():
    made = profile_of("lstm", DEFINITIONS["lstm"])
    kept = load_profile("lstm")
    assert [layer.shapes for layer in made.layers] == [layer.shapes for layer in kept.layers]
    assert made.forward_s == pytest.approx(kept.forward_s, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DEFINITIONS if name != "lstm"])
def test_the_files_are_what_the_definitions_give(name):
    for module in ("torchvision", "timm", "transformers"):
        pytest.importorskip(module, reason="needs the extras [vision,text]")
    made, kept = profile_of(name, DEFINITIONS[name]), load_profile(name)
    assert [layer.shapes for layer in made.layers] == [layer.shapes for layer in kept.layers]
    assert made.forward_s == pytest.approx(kept.forward_s, rel=0.2)
