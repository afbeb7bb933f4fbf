import pytest
import torch

from lightning_dear.workloads import text
from lightning_dear.workloads.extras import require

WORDS = ["the", "cat", "sat", "on", "a", "mat"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def tokenizer_folder(tmp_path):
    """Return the folder of a BERT tokenizer that knows six words."""
    pytest.importorskip("transformers", reason='pip install "lightning-dear[text]"')
    from transformers import BertTokenizerFast

    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    folder = tmp_path / "tokenizer"
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path, tokenizer_folder):
    """Return a data module over 600 words, set up."""
    (tmp_path / "book.txt").write_text(" ".join(WORDS * 100))
    module = text.TextFileDataModule(
        root=str(tmp_path / "book.txt"),
        tokenizer=str(tokenizer_folder),
        batch_size=4,
        sequence_length=10,
        mask_probability=0.3,
        num_workers=0,
    )
    module.setup("fit")
    return module


def test_sequences_are_split_in_order(data):
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [54, 3, 3]
    assert data._tokenizer.decode(data.train_set[0]) == "the cat sat on a mat the cat sat on"


def test_masking_keeps_labels_of_masked_tokens_only(data):
    torch.manual_seed(0)
    sequences = list(data.train_set)
    batch = data.collate(sequences)
    tokens = torch.stack(sequences)
    is_masked = batch["labels"] != text.IGNORED_LABEL
    assert is_masked.float().mean().item() == pytest.approx(0.3, abs=0.05)
    assert torch.equal(batch["labels"][is_masked], tokens[is_masked])
    assert torch.equal(batch["input_ids"][~is_masked], tokens[~is_masked])
    is_mask_token = batch["input_ids"][is_masked] == data._tokenizer.mask_token_id
    assert is_mask_token.float().mean().item() == pytest.approx(0.8, abs=0.1)


def test_every_sequence_has_something_to_restore(data):
    data.mask_probability = 1e-9
    labels = data.collate(list(data.train_set))["labels"]
    assert (labels != text.IGNORED_LABEL).sum(dim=1).tolist() == [1] * len(labels)


def test_a_missing_tokenizer_names_both_remedies(tmp_path):
    pytest.importorskip("transformers", reason='pip install "lightning-dear[text]"')
    module = text.TextFileDataModule(root=str(tmp_path), tokenizer=str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer=.*data\.download=true"):
        module.setup("fit")


def test_missing_text_names_the_option(tmp_path, tokenizer_folder):
    module = text.TextFileDataModule(
        root=str(tmp_path / "nowhere"), tokenizer=str(tokenizer_folder)
    )
    with pytest.raises(FileNotFoundError, match=r"data\.root="):
        module.setup("fit")


@pytest.mark.parametrize(
    "options", [{"mask_probability": 0.0}, {"eval_fraction": 0.5}], ids=lambda options: str(options)
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        text.TextFileDataModule(root="root", **options)


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setattr(text, "require", lambda module, extra: require("no_such", extra))
    with pytest.raises(ModuleNotFoundError, match=r"lightning-dear\[text\]"):
        text.TextFileDataModule(root="root").setup("fit")
