"""BERT as a masked language model on text files; needs the extra ``[text]``."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_dear.workloads.extras import require
from lightning_dear.workloads.schedules import OptimizerFactory, SchedulerFactory
from lightning_dear.workloads.splits import SplitDataModule
from lightning_dear.workloads.task import Task

IGNORED_LABEL = -100
"""Label of positions that the loss leaves out; Hugging Face's own value."""

_SIZES = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
}


def bert_net(size: str = "base", vocab_size: int = 30522, num_layers: int | None = None) -> Any:
    """Build a BERT for masked language modelling with random weights; downloads nothing.

    Args:
        size: ``base`` (110 million parameters) or ``large`` (340 million).
        vocab_size: Entries of the tokenizer's vocabulary.
        num_layers: Layers, where they should differ from the size's own; None keeps those.

    Raises:
        ValueError: If the size is unknown; the message lists the valid ones.
        ModuleNotFoundError: If transformers is not installed.
    """
    if size not in _SIZES:
        raise ValueError(f"Unknown size {size!r}; valid names: {', '.join(_SIZES)}.")
    transformers = require("transformers", "text")
    options = dict(_SIZES[size])
    options["intermediate_size"] = 4 * options["hidden_size"]
    if num_layers is not None:
        options["num_hidden_layers"] = num_layers
    config = transformers.BertConfig(vocab_size=vocab_size, **options)
    return transformers.BertForMaskedLM(config)


class MaskedLanguageModel(Task):
    """Trains ``net`` to restore masked tokens; logs train_loss, val_loss and test_loss (nats).

    Args:
        net: A Hugging Face model that returns a ``loss`` when given ``labels``.
        optimizer: Builds the optimizer from an iterable of parameters.
        scheduler: Builds a schedule from the optimizer and ``total_steps``, or None.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler)
        self.val_loss = MeanMetric()
        self.test_loss = MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch and log it."""
        loss: Tensor = self.net(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add one batch to val_loss."""
        self._add(self.val_loss, batch)
        self.log("val_loss", self.val_loss, prog_bar=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add one batch to test_loss."""
        self._add(self.test_loss, batch)
        self.log("test_loss", self.test_loss)

    def _add(self, metric: MeanMetric, batch: dict[str, Tensor]) -> None:
        num_masked = (batch["labels"] != IGNORED_LABEL).sum()
        metric(self.net(**batch).loss, weight=num_masked)


class TextFileDataModule(SplitDataModule):
    """Text files cut into sequences of tokens, some of them masked anew for every batch.

    Args:
        root: A text file, or a folder whose ``.txt`` files are read in order of name.
        tokenizer: Name or folder of a Hugging Face tokenizer with a mask token.
        batch_size: Sequences per batch and process.
        sequence_length: Tokens per sequence.
        mask_probability: Share of tokens to restore, in (0, 1).
        eval_fraction: Share of the sequences, from the end, for validation and again for the test.
        download: Fetch the tokenizer where it is not on this machine.
        num_workers: Loader processes per training process.
    """

    def __init__(
        self,
        root: str,
        tokenizer: str = "bert-base-uncased",
        batch_size: int = 8,
        sequence_length: int = 128,
        mask_probability: float = 0.15,
        eval_fraction: float = 0.05,
        download: bool = False,
        num_workers: int = 2,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if not 0.0 < mask_probability < 1.0:
            raise ValueError(f"mask_probability must be in (0, 1), got {mask_probability}.")
        if not 0.0 < eval_fraction < 0.5:
            raise ValueError(f"eval_fraction must be in (0, 0.5), got {eval_fraction}.")
        self.root = root
        self.tokenizer_name = tokenizer
        self.sequence_length = sequence_length
        self.mask_probability = mask_probability
        self.eval_fraction = eval_fraction
        self.download = download

    def prepare_data(self) -> None:
        """Download the tokenizer on one process per host, if that was asked for."""
        if self.download:
            require("transformers", "text").AutoTokenizer.from_pretrained(self.tokenizer_name)

    def setup(self, stage: str) -> None:
        """Tokenize the files into memory; called on every process.

        Raises:
            FileNotFoundError: If the text or the tokenizer is missing.
            ValueError: If the text is too short to be split.
        """
        if self.train_set is not None:
            return
        self.tokenizer = self._load_tokenizer()
        text = "\n".join(path.read_text(encoding="utf-8") for path in self._files())
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        num_sequences = len(tokens) // self.sequence_length
        num_eval = int(num_sequences * self.eval_fraction)
        if num_eval < 1:
            raise ValueError(
                f"{self.root} holds {num_sequences} sequences of {self.sequence_length} tokens, "
                "too few to hold some out: give more text or a smaller data.sequence_length."
            )
        flat = torch.tensor(tokens[: num_sequences * self.sequence_length])
        sequences = list(flat.view(num_sequences, self.sequence_length))
        self.train_set = sequences[: -2 * num_eval]  # type: ignore[assignment]
        self.val_set = sequences[-2 * num_eval : -num_eval]  # type: ignore[assignment]
        self.test_set = sequences[-num_eval:]  # type: ignore[assignment]

    def collate(self, items: list[Tensor]) -> dict[str, Tensor]:
        """Mask tokens as BERT does: 80 % by [MASK], 10 % by any token, 10 % left in place."""
        tokens = torch.stack(items)
        is_masked = torch.rand(tokens.shape) < self.mask_probability
        # A batch without a masked token would have a loss of nan.
        is_masked[:, 0] |= ~is_masked.any(dim=1)
        labels = tokens.masked_fill(~is_masked, IGNORED_LABEL)
        draw = torch.rand(tokens.shape)
        inputs = tokens.masked_fill(is_masked & (draw < 0.8), self.tokenizer.mask_token_id)
        is_random = is_masked & (draw >= 0.9)
        inputs[is_random] = torch.randint(len(self.tokenizer), (int(is_random.sum()),))
        return {"input_ids": inputs, "labels": labels}

    def _files(self) -> list[Path]:
        root = Path(self.root)
        files = [root] if root.is_file() else sorted(root.glob("*.txt"))
        if not files:
            raise FileNotFoundError(
                f"{root} is neither a text file nor a folder with .txt files: set data.root=... "
                "to one."
            )
        return files

    def _load_tokenizer(self) -> Any:
        transformers = require("transformers", "text")
        try:
            return transformers.AutoTokenizer.from_pretrained(
                self.tokenizer_name, local_files_only=not self.download
            )
        except OSError as error:
            raise FileNotFoundError(
                f"The tokenizer {self.tokenizer_name!r} is not on this machine: set "
                "data.tokenizer=... to its folder, or data.download=true."
            ) from error
