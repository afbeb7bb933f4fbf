"""Profiles: the models' published sizes, scaling, files."""

import json
import math
from dataclasses import replace

import pytest

from lightning_dear.workloads.replay.profile import (
    PROFILES,
    LayerProfile,
    ModelProfile,
    load_profile,
)
from tests.workloads.replaying import small_profile

# Tensors and parameters that the models have by their published definitions.
SIZES = {
    "resnet50": (161, 25_557_032),
    "densenet201": (604, 20_013_928),
    "inception_v4": (449, 42_679_816),
    "bert_base": (206, 110_111_042),
    "bert_large": (398, 336_232_258),
    "resnet101": (314, 44_549_160),
    "vgg16": (32, 138_357_544),
    # Embedding, two LSTM layers with two biases each, output layer.
    "lstm": (11, 2 * 10_000 * 1500 + 10_000 + 2 * 4 * 1500 * (2 * 1500 + 2)),
    # 44,401,393 as torchvision states it, and the batch normalisation that it freezes by default.
    "mask_rcnn": (201, 44_401_393 + 53_120),
}


def test_every_profile_is_checked():
    assert set(PROFILES) == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_a_profile_has_the_sizes_of_the_published_model(name):
    profile = load_profile(name)
    assert profile.name == name
    assert (profile.num_tensors, profile.num_parameters) == SIZES[name]
    assert profile.nbytes == 4 * SIZES[name][1]


@pytest.mark.parametrize("name", SIZES)
def test_a_profile_says_where_its_times_come_from(name):
    profile = load_profile(name)
    assert profile.source == "flops"
    assert "TFLOP/s" in profile.note
    assert "not a measurement" in profile.note
    assert 0.01 < profile.forward_s < 1
    assert profile.backward_s == pytest.approx(2 * profile.forward_s, rel=1e-3)
    assert len({layer.name for layer in profile.layers}) == len(profile.layers)


def test_tied_weights_belong_to_the_embedding_that_is_read_first():
    layers = {layer.name: layer for layer in load_profile("bert_base").layers}
    first = next(iter(layers.values()))
    assert first.shapes == ((30528, 768),)
    assert layers["cls.predictions.decoder"].shapes == ((30528,),)
    # The product with the vocabulary: 4096 tokens x 768 x 30528, at 7 TFLOP/s.
    seconds = 2 * 4096 * 768 * 30528 / 7e12
    assert layers["cls.predictions.decoder"].forward_s == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("scale", [8, 64])
def test_scaling_divides_the_whole_and_keeps_times_and_tensors(name, scale):
    profile = load_profile(name)
    scaled = profile.scaled(scale)
    assert scaled.num_parameters * scale == pytest.approx(profile.num_parameters, rel=2e-3)
    assert (scaled.forward_s, scaled.backward_s) == (profile.forward_s, profile.backward_s)
    for layer, before in zip(scaled.layers, profile.layers, strict=True):
        for shape, old in zip(layer.shapes, before.shapes, strict=True):
            assert min(64, math.prod(old)) <= math.prod(shape) <= math.prod(old)


def test_scaling_keeps_small_tensors_and_takes_their_surplus_from_large_ones():
    profile = small_profile(shapes=[((10,), (640,)), ((100, 1000),)])
    small, large = profile.scaled(100).layers
    assert small.shapes == ((10,), (64,))
    assert large.shapes == ((round(100_650 / 100) - 74,),)


def test_a_scale_of_one_changes_nothing():
    profile = small_profile()
    assert profile.scaled(1) is profile


def test_a_scale_beyond_the_smallest_tensors_still_gives_every_tensor():
    assert small_profile().scaled(1e9).num_parameters == 64 + 14 + 64 + 11 + 5 + 64


@pytest.mark.parametrize("scale", [0, 0.5, -1, math.inf, math.nan])
def test_a_bad_scale_is_refused(scale):
    with pytest.raises(ValueError, match="scale=.* is not valid"):
        small_profile().scaled(scale)


def test_compute_is_rescaled_layer_by_layer():
    profile = load_profile("resnet50")
    faster = profile.with_compute(0.03)
    # The profile's times are rounded, so that its ratio is not quite 2.
    assert faster.forward_s == pytest.approx(0.01, rel=1e-4)
    assert faster.backward_s == pytest.approx(0.02, rel=1e-4)
    ratios = {
        round(new.forward_s / old.forward_s / faster.forward_s * profile.forward_s, 6)
        for new, old in zip(faster.layers, profile.layers, strict=True)
    }
    assert ratios == {1.0}


def test_compute_is_rescaled_as_it_is_divided():
    slower = small_profile(forward_s=0.1, backward_s=0.3).with_compute(0.4)
    assert (slower.forward_s, slower.backward_s) == pytest.approx((0.1, 0.3))
    one_sided = small_profile(forward_s=0)
    assert one_sided.with_compute(2).backward_s == pytest.approx(2)


def test_impossible_compute_is_refused():
    with pytest.raises(ValueError, match="compute_s"):
        small_profile().with_compute(0)
    nothing = small_profile(forward_s=0)
    nothing = replace(nothing, layers=tuple(replace(one, backward_s=0.0) for one in nothing.layers))
    with pytest.raises(ValueError, match="takes no time"):
        nothing.with_compute(1)


def test_a_saved_profile_is_read_back(tmp_path):
    profile = small_profile(forward_s=0.00123)
    profile.save(tmp_path / "own.json")
    assert load_profile(tmp_path / "own.json") == profile
    assert len((tmp_path / "own.json").read_text().splitlines()) == 6 + len(profile.layers)


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"Unknown profile 'resnet'.*bert_base.*resnet50"):
        load_profile("resnet")
    with pytest.raises(FileNotFoundError):
        load_profile("missing.json")


@pytest.mark.parametrize(
    "content", ["[]", "{}", "x", json.dumps({"layers": [{"nome": "a"}], "name": "b"})]
)
def test_what_is_not_a_profile_is_refused(content, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is no profile"):
        load_profile(path)


def test_impossible_values_are_refused():
    with pytest.raises(ValueError, match="has no or an empty parameter"):
        LayerProfile("a", (), 0.1, 0.1)
    with pytest.raises(ValueError, match="has no or an empty parameter"):
        LayerProfile("a", ((3, 0),), 0.1, 0.1)
    with pytest.raises(ValueError, match="not negative"):
        LayerProfile("a", ((3,),), -0.1, 0.1)
    with pytest.raises(ValueError, match="no layer"):
        ModelProfile("a", "flops", "", ())
