"""The stack of linear layers."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from lightning_dear.paths import conf_dir
from lightning_dear.workloads.nets import MLP


def test_it_flattens_samples_and_gives_logits() -> None:
    net = MLP(in_features=12, num_classes=3, width=8, num_hidden=2)
    assert net(torch.ones(5, 3, 2, 2)).shape == (5, 3)
    assert len(list(net.parameters())) == 6


def test_the_configured_one_has_50_mib() -> None:
    options = OmegaConf.load(conf_dir() / "model/mlp.yaml").net
    del options["_target_"]
    with torch.device("meta"):
        net = MLP(**options)
    assert 48 < sum(parameter.nbytes for parameter in net.parameters()) / 2**20 < 52


def test_it_needs_a_hidden_layer() -> None:
    with pytest.raises(ValueError, match="Choose 1 or more"):
        MLP(4, 2, 8, 0)
