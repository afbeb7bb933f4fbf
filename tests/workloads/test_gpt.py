import pytest
import torch

from lightning_dear.workloads.nets import GPT


def small(**options):
    torch.manual_seed(0)
    return GPT(**{"context_length": 8, "width": 16, "num_layers": 2, "num_heads": 2, **options})


def test_a_position_sees_only_what_came_before():
    net = small().eval()
    text = torch.randint(256, (1, 8))
    changed = text.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = net(text), net(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-6)


def test_positions_matter():
    logits = small().eval()(torch.full((1, 8), 65))
    assert not torch.allclose(logits[0, 0], logits[0, 1], atol=1e-6)


def test_an_untrained_model_knows_nothing():
    text = torch.randint(256, (4, 9))
    logits = small()(text[:, :8])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    assert loss.item() == pytest.approx(5.545, abs=0.1)


def test_first_weights_are_gpt2s_or_torchs():
    def std_of_queries(net: GPT) -> float:
        return net.blocks[0].attention.query_key_value.weight.std().item()

    assert std_of_queries(small(width=64)) == pytest.approx(0.02, rel=0.1)
    assert std_of_queries(small(width=64, std=0.1)) == pytest.approx(0.1, rel=0.1)
    assert std_of_queries(small(width=64, std=None)) == pytest.approx((3 * 64) ** -0.5, rel=0.1)


def test_too_long_an_input_is_refused():
    with pytest.raises(ValueError, match="context_length=8"):
        small()(torch.zeros(1, 9, dtype=torch.int64))


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="multiple of num_heads"):
        small(width=15)
