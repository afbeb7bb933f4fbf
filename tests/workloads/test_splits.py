import pytest
import torch

from lightning_dear.workloads.data import SplitDataModule


class Numbers(SplitDataModule):
    def load(self):
        return (torch.arange(10),) * 3


def test_training_is_shuffled_and_complete_batches_only():
    module = Numbers(batch_size=4)
    module.setup("fit")
    torch.manual_seed(0)
    batches = list(module.train_dataloader())
    assert [len(batch) for batch in batches] == [4, 4]
    assert torch.cat(batches).tolist() != list(range(8))


@pytest.mark.parametrize("name", ["val_dataloader", "test_dataloader"])
def test_evaluation_sees_every_item_once_in_order(name):
    module = Numbers(batch_size=4)
    module.setup("fit")
    assert torch.cat(list(getattr(module, name)())).tolist() == list(range(10))


def test_a_loader_before_setup_names_the_remedy():
    with pytest.raises(RuntimeError, match=r"setup\(\)"):
        Numbers(batch_size=1).train_dataloader()
