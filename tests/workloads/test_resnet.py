import pytest
import torch

from lightning_dear.workloads.nets import ResidualBlock, ResNet


def test_logits_have_one_column_per_class():
    net = ResNet(in_channels=3, num_classes=7, channels=(4, 8), num_blocks=1)
    assert net(torch.rand(2, 3, 8, 8)).shape == (2, 7)


def test_every_parameter_gets_a_gradient():
    net = ResNet(channels=(4, 8), num_blocks=2)
    net(torch.rand(2, 1, 8, 8)).sum().backward()
    assert [name for name, p in net.named_parameters() if p.grad is None] == []


def test_a_block_adds_its_input():
    block = ResidualBlock(4, 4).eval()
    torch.nn.init.zeros_(block.norm2.weight)
    images = torch.rand(2, 4, 8, 8)
    assert torch.equal(block(images), images)


@pytest.mark.parametrize("options", [{"channels": ()}, {"channels": (0,)}, {"num_blocks": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="must be|Choose 1 or more"):
        ResNet(**options)
