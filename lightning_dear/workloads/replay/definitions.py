"""Where the sizes of the profiled models come from, and which batch they are timed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dear.workloads.extras import require

BERT_VOCABULARY = 30528
"""The 30522 words of bert-base-uncased, padded to a multiple of 8."""


@dataclass(frozen=True)
class Definition:
    """A model to profile.

    Attributes:
        build: Makes the model; called with the meta device as the default.
        run: Runs one training forward of it.
        what: Batch and whatever else the time depends on, in words.
        source: The library that defines the sizes.
    """

    build: Callable[[], Any]
    run: Callable[[Any], None]
    what: str
    source: str


def _torchvision(name: str, batch_size: int) -> Definition:
    def build() -> Any:
        return require("torchvision.models", "vision").get_model(name, weights=None)

    return _images(build, batch_size, 224, f"torchvision's {name}")


def _timm(name: str, batch_size: int, image_size: int) -> Definition:
    def build() -> Any:
        return require("timm", "vision").create_model(name)

    return _images(build, batch_size, image_size, f"timm's {name}")


def _images(build: Callable[[], Any], batch_size: int, image_size: int, source: str) -> Definition:
    def run(model: Any) -> None:
        model(torch.empty(batch_size, 3, image_size, image_size))

    what = f"Batch of {batch_size} images of {image_size} x {image_size} pixels."
    return Definition(build, run, what, source)


def _bert(size: str, batch_size: int, length: int = 64) -> Definition:
    width, depth, heads = {"base": (768, 12, 12), "large": (1024, 24, 16)}[size]

    def build() -> Any:
        transformers = require("transformers", "text")
        config = transformers.BertConfig(
            vocab_size=BERT_VOCABULARY,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            attn_implementation="eager",
        )
        return transformers.BertForPreTraining(config)

    def run(model: Any) -> None:
        model(input_ids=torch.empty(batch_size, length, dtype=torch.long))

    what = f"Batch of {batch_size} sequences of {length} tokens, both pretraining heads, tied."
    return Definition(build, run, what, "transformers' BertForPreTraining, vocabulary 30528")


class _WordLanguageModel(nn.Module):
    """Embedding, two LSTM layers and an untied softmax layer over `vocabulary` words."""

    def __init__(self, vocabulary: int = 10_000, width: int = 1500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm_0 = nn.LSTM(width, width)
        self.lstm_1 = nn.LSTM(width, width)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm_0(self.embedding(words))
        hidden, _ = self.lstm_1(hidden)
        logits: Tensor = self.decoder(hidden)
        return logits


def _lstm(batch_size: int = 20, length: int = 35) -> Definition:
    def run(model: Any) -> None:
        model(torch.empty(length, batch_size, dtype=torch.long))

    what = (
        f"Batch of {batch_size} sequences of {length} words; the large LSTM language model of Penn"
        " Treebank: 2 layers of 1500, 10,000 words, untied."
    )
    return Definition(_WordLanguageModel, run, what, "torch.nn.LSTM, after the published sizes")


def _mask_rcnn(batch_size: int = 2, height: int = 800, width: int = 1088) -> Definition:
    num_boxes, num_masks = 512, 128

    def build() -> Any:
        detection = require("torchvision.models.detection", "vision")
        return detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)

    def run(model: Any) -> None:
        # Part by part: the regions between the parts depend on values, which do not exist here.
        features = model.backbone(torch.empty(batch_size, 3, height, width))
        model.rpn.head(list(features.values()))
        heads = model.roi_heads
        heads.box_predictor(heads.box_head(torch.empty(batch_size * num_boxes, 256, 7, 7)))
        heads.mask_predictor(heads.mask_head(torch.empty(batch_size * num_masks, 256, 14, 14)))

    what = (
        f"Batch of {batch_size} images of {height} x {width} pixels, {num_boxes} boxes and"
        f" {num_masks} masks for each; all layers trained; choosing regions takes no time."
    )
    return Definition(build, run, what, "torchvision's maskrcnn_resnet50_fpn")


DEFINITIONS = {
    "resnet50": _torchvision("resnet50", 64),
    "densenet201": _torchvision("densenet201", 32),
    "inception_v4": _timm("inception_v4", 64, 299),
    "bert_base": _bert("base", 64),
    "bert_large": _bert("large", 32),
    "resnet101": _torchvision("resnet101", 64),
    "vgg16": _torchvision("vgg16", 64),
    "lstm": _lstm(),
    "mask_rcnn": _mask_rcnn(),
}
"""What `make_profiles` makes, by the profile's name."""
