"""Masked language models on text files; needs the extra ``[text]``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dear.workloads.data import SplitDataModule
from lightning_dear.workloads.extras import require
from lightning_dear.workloads.task import Task

IGNORED_LABEL = -100
"""Label of positions that the loss leaves out; Hugging Face's own value."""

class MaskedLanguageModel(Task):
    """Trains ``net`` to restore masked tokens; logs train_loss, val_loss and test_loss (nats).

    ``net`` is a Hugging Face model that returns a ``loss`` when given ``labels``.
    """

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean loss of the masked tokens."""
        loss: Tensor = self.net(**batch).loss
        return loss

    def evaluate(self, batch: dict[str, Tensor], stage: str) -> None:
        """Log the loss; each masked token counts alike."""
        num_masked = int((batch["labels"] != IGNORED_LABEL).sum())
        self.log_mean(stage, "loss", self.loss(batch), weight=num_masked)


@dataclass(kw_only=True, eq=False, repr=False)
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

    root: str
    tokenizer: str = "bert-base-uncased"
    batch_size: int = 8
    sequence_length: int = 128
    mask_probability: float = 0.15
    eval_fraction: float = 0.05
    download: bool = False
    num_workers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.mask_probability < 1.0:
            raise ValueError(f"mask_probability must be in (0, 1), got {self.mask_probability}.")
        if not 0.0 < self.eval_fraction < 0.5:
            raise ValueError(f"eval_fraction must be in (0, 0.5), got {self.eval_fraction}.")

    def prepare_data(self) -> None:
        """Download the tokenizer on one process per host, if that was asked for."""
        if self.download:
            require("transformers", "text").AutoTokenizer.from_pretrained(self.tokenizer)

    def load(self) -> Sequence[Tensor]:
        """Tokenize the files into memory; return tokens (sequence, position).

        Raises:
            FileNotFoundError: If the text or the tokenizer is missing.
            ValueError: If the text is too short to be split.
        """
        self._tokenizer = self._load_tokenizer()
        text = "\n".join(path.read_text(encoding="utf-8") for path in self._files())
        tokens = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        num_sequences = len(tokens) // self.sequence_length
        num_eval = int(num_sequences * self.eval_fraction)
        if num_eval < 1:
            raise ValueError(
                f"{self.root} holds {num_sequences} sequences of {self.sequence_length} tokens, "
                "too few to hold some out: give more text or a smaller data.sequence_length."
            )
        flat = torch.tensor(tokens[: num_sequences * self.sequence_length])
        sizes = [num_sequences - 2 * num_eval, num_eval, num_eval]
        return torch.split(flat.view(num_sequences, -1), sizes)

    def collate(self, items: list[Tensor]) -> dict[str, Tensor]:
        """Mask tokens as BERT does: 80 % by [MASK], 10 % by any token, 10 % left in place."""
        tokens = torch.stack(items)
        is_masked = torch.rand(tokens.shape) < self.mask_probability
        # A batch without a masked token would have a loss of nan.
        is_masked[:, 0] |= ~is_masked.any(dim=1)
        labels = tokens.masked_fill(~is_masked, IGNORED_LABEL)
        draw = torch.rand(tokens.shape)
        inputs = tokens.masked_fill(is_masked & (draw < 0.8), self._tokenizer.mask_token_id)
        is_random = is_masked & (draw >= 0.9)
        inputs[is_random] = torch.randint(len(self._tokenizer), (int(is_random.sum()),))
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
                self.tokenizer, local_files_only=not self.download
            )
        except OSError as error:
            raise FileNotFoundError(
                f"The tokenizer {self.tokenizer!r} is not on this machine: set "
                "data.tokenizer=... to its folder, or data.download=true."
            ) from error
